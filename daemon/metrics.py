"""What the daemon counts, as Prometheus metrics. vLLM's names where the meaning is the same.

RUNBOOK.md lists them all. The counts of requests add up: arrived = ended (finished + aborted +
failed) + open. Those refused at the door never arrived; those whose time ran out in the queue are
counted as refused and as failed.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from daemon import metric_buckets as buckets
from daemon.errors import Draining, NotReady, QueueFull, QueueTimeout, ServeError, SloMissed
from daemon.instance_metrics import InstanceMetrics
from daemon.instances import Instance
from daemon.metric_families import Families
from daemon.request import Phase, Request
from daemon.request_metrics import SLOS, RequestMetrics
from daemon.slo import SloBook, Targets, WindowReport
from ipc.messages import Pulled, Stats
from ipc.vocabulary import FinishReason, InstanceSpec

WINDOWS_S = {"1m": 60.0, "5m": 300.0, "1h": 3600.0}
_ENDINGS = (Phase.FINISHED, Phase.ABORTED, Phase.FAILED)
_REASONS = (*(reason.value for reason in FinishReason), "abort", "error")


class Tally:
    """The counts that the status page shows, to be read without a scrape."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_retried = 0
        self.ended: Counter[Phase] = Counter()
        self.refused: Counter[str] = Counter()
        self.progress_age_s: dict[str, float] = {}  # of instances that are up


class Metrics:
    """Every count has one method that says when it changes.

    `clock` is the controller's: windows of the SLO are by the time at which requests ended.
    """

    def __init__(
        self,
        model_name: str,
        targets: Targets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._families = families = Families(model_name)
        self._model = families.model_labels
        self.tally = Tally()
        targets = targets or Targets()
        self._requests = RequestMetrics(families, targets)
        self._instances = InstanceMetrics(families)
        self._make_request_counts(families)
        self._make_token_counts(families, targets)
        self._make_vllm_gauges(families)
        self._lag = families.histogram(
            "distserve_event_loop_lag_seconds",
            "How late the daemon's event loop runs what is due",
            buckets.LAG_S,
        )
        self.registry.register(_Attainment(self.slo, clock))
        ProcessCollector(registry=self.registry)

    @property
    def registry(self) -> CollectorRegistry:
        return self._families.registry

    @property
    def model_labels(self) -> dict[str, str]:
        return self._model

    @property
    def slo(self) -> SloBook:
        """How well the targets were met of late."""
        return self._requests.slo

    def render(self, phases: Mapping[str, int]) -> tuple[str, bytes]:
        """(content type, exposition). `phases` says how many trips are where at this moment."""
        running = phases.get(Phase.DECODE.name.lower(), 0)
        self._running.set(running)
        self._waiting.set(sum(phases.values()) - running)
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    # ---- requests ---------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        self.tally.num_arrived += 1
        self._arrived.inc()
        self._prompt_tokens.inc(len(request.spec.prompt))

    def tokens(self, count: int, gaps_s: Mapping[float, int]) -> None:
        """Choices gained tokens; `gaps_s` tells how many of them came how long after the ones
        before, each choice's first ones left out."""
        self._output_tokens.inc(count)
        for gap_s, times in gaps_s.items():
            self._inter_token.observe(gap_s, times)

    def refused(self, error: ServeError) -> None:
        """A request that was taken, but never begun, counts as ended too."""
        reason = error.code or error.kind
        self.tally.refused[reason] += 1
        self._refused.labels(reason).inc()

    def unknown_field(self, name: str) -> None:
        """A body had a field that was ignored; its name is one of a few."""
        self._unknown_fields.labels(name).inc()

    def retried(self, num_choices: int) -> None:
        self.tally.num_retried += num_choices
        self._retried.inc(num_choices)

    def ended(self, request: Request, phase: Phase) -> None:
        """A request that was taken has ended; latencies count only where an answer was given."""
        self.tally.ended[phase] += 1
        self._ended[phase].inc()
        otherwise = "abort" if phase is Phase.ABORTED else "error"
        for choice in request.choices:
            reason = otherwise if choice.finished is None else choice.finished.value
            self._success[reason].inc()
        if phase is Phase.FINISHED:
            self._requests.answered(request)

    def loop_lagged(self, lag_s: float) -> None:
        self._lag.observe(lag_s)

    # ---- instances --------------------------------------------------------------------------

    def instance_up(self, spec: InstanceSpec, kernels: str) -> None:
        self._instances.up(spec, kernels)

    def instance_down(self, spec: InstanceSpec, kernels: str) -> None:
        self.tally.progress_age_s.pop(spec.name, None)
        self._instances.down(spec, kernels)

    def instance_removed(self, instance: str) -> None:
        self._instances.forget(instance)

    def observed(self, instance: Instance, stats: Stats) -> None:
        """A leader has told its books; `instance.stats` are still those before."""
        self._instances.reported(instance, stats)

    def decode_step(self, num_tokens: int) -> None:
        self._instances.decode_step(num_tokens)

    def pulled(self, event: Pulled) -> None:
        self._instances.pulled(event)

    def preempted(self) -> None:
        self._instances.preempted()

    def got_on(self, instance: str, age_s: float) -> None:
        self.tally.progress_age_s[instance] = age_s
        self._instances.got_on(instance, age_s)

    def wedged(self, instance: str) -> None:
        self._instances.wedged(instance)

    def restarted(self, instance: str) -> None:
        self._instances.restarted(instance)

    # ---- made once --------------------------------------------------------------------------

    def _make_request_counts(self, families: Families) -> None:
        self._arrived = families.counter(
            "distserve_requests_arrived", "Requests that were taken: arrived = ended + open"
        )
        ended = families.counter(
            "distserve_requests_ended",
            "Requests that were taken and have ended, by how",
            ["ending"],
        )
        self._ended = {phase: ended.labels(phase.name.lower()) for phase in _ENDINGS}
        success = families.counter(
            "vllm:request_success",
            "Choices that have ended, by finish reason; abort: the client left; error: it failed",
            [*self._model, "finished_reason"],
        )
        self._success = {
            reason: success.labels(**self._model, finished_reason=reason) for reason in _REASONS
        }
        self._retried = families.counter(
            "distserve_retries",
            "Choices that were prefilled again because a worker that had them died or refused",
        )
        self._unknown_fields = families.counter(
            "distserve_unknown_fields",
            "Fields of requests that nobody here knows, by name: ignored. At most 64 names",
            ["field"],
        )
        self._refused = families.counter(
            "distserve_requests_refused",
            "Requests refused at the door, or before their prefill, by reason",
            ["reason"],
        )
        for kind in (QueueFull, SloMissed, QueueTimeout, NotReady, Draining):
            self._refused.labels(kind.code)  # a rate is seen from the first one on

    def _make_token_counts(self, families: Families, targets: Targets) -> None:
        self._prompt_tokens = families.model_counter("vllm:prompt_tokens", "Prompt tokens taken")
        self._output_tokens = families.model_counter("vllm:generation_tokens", "Tokens generated")
        self._inter_token = families.quick_histogram(
            ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            "Time between tokens of a choice; the second name is the older one",
            buckets.with_edge(buckets.TPOT_S, targets.tpot_s),
        )
        for what in ("queries", "hits"):
            families.model_counter(
                f"vllm:prefix_cache_{what}",
                "No prefix is reused: nothing is looked up, nothing is found",
            )

    def _make_vllm_gauges(self, families: Families) -> None:
        self._running = families.model_gauge("vllm:num_requests_running", "Requests in decode")
        self._waiting = families.model_gauge("vllm:num_requests_waiting", "Requests before decode")
        families.model_gauge(
            "vllm:num_requests_swapped", "Blocks are never swapped out: preempted requests wait"
        )


class _Attainment(Collector):
    """The SLO's windows, summed when they are asked for; a window without requests tells none."""

    def __init__(self, slo: SloBook, clock: Callable[[], float]) -> None:
        self._slo = slo
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        attainment = GaugeMetricFamily(
            "distserve_slo_attainment",
            "Share of the answered requests of a window that met the SLO",
            labels=["slo", "window"],
        )
        goodput = GaugeMetricFamily(
            "distserve_goodput_requests_per_second",
            "Answered requests of a window that met both targets, per second",
            labels=["window"],
        )
        for window, window_s in WINDOWS_S.items():
            report = self._slo.report(self._clock(), window_s)
            goodput.add_metric([window], report.goodput_per_s)
            for slo in SLOS if report.num_requests else ():
                attainment.add_metric([slo, window], _num_met(report, slo) / report.num_requests)
        yield attainment
        yield goodput


def _num_met(report: WindowReport, slo: str) -> int:
    num_met: int = getattr(report, f"num_met_{slo}")
    return num_met
