"""What the daemon counts, as Prometheus metrics. vLLM's names where the meaning is the same.

A registry of our own, so that tests and several daemons in one process do not share counts.
"""

from collections.abc import Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from daemon.errors import ServeError
from daemon.request import Phase, Request
from ipc.messages import Stats
from ipc.vocabulary import InstanceSpec

_LATENCY_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TPOT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_LAG_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
_TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_BLOCK_STATES = ("free", "held", "in_use")
_STAGES = ("prefill_queue", "prefill", "transfer", "decode_queue", "decode")
_WORKER_COUNTERS = (
    "num_steps",
    "prefill_tokens",
    "decode_tokens",
    "prefill_steps",
    "decode_steps",
    "num_pulls",
    "pulled_bytes",
    "pull_faults",
    "hidden_bytes",
    "num_preempted",
    "audit_failures",
    "control_s",
)


class Metrics:
    """Every count has one method that says when it changes."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._running = self._gauge("vllm:num_requests_running", "Requests in decode")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests before decode")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken")
        self._output_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended with an answer, by finish reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._ended = Counter(
            "distserve_requests_ended",
            "Requests that were taken and have ended, by how",
            ["ending"],
            registry=self.registry,
        )
        self._retried = Counter(
            "distserve_retries",
            "Choices that were prefilled again because a worker that had them died or refused",
            registry=self.registry,
        )
        self._refused = Counter(
            "distserve_requests_refused",
            "Requests refused at the door, or before their prefill, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", _LATENCY_BUCKETS_S
        )
        self._tpot = self._histogram(
            "vllm:time_per_output_token_seconds",
            "(last token - first token) / (output tokens - 1)",
            _TPOT_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end", _LATENCY_BUCKETS_S
        )
        self._prompt_size = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request", _TOKEN_BUCKETS
        )
        self._output_size = self._histogram(
            "vllm:request_generation_tokens", "Output tokens per request", _TOKEN_BUCKETS
        )
        self._stages = Histogram(
            "distserve_stage_seconds",
            "The five stages of a request's life (DistServe, section 6.3)",
            ["stage"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._lag = Histogram(
            "distserve_event_loop_lag_seconds",
            "How late the daemon's event loop runs what is due",
            buckets=_LAG_BUCKETS_S,
            registry=self.registry,
        )
        self._blocks = Gauge(
            "distserve_kv_blocks",
            "KV blocks by instance and state",
            ["instance", "state"],
            registry=self.registry,
        )
        self._worker = Gauge(
            "distserve_instance",
            "An instance's own counts since it started",
            ["instance", "count"],
            registry=self.registry,
        )
        self._up = Gauge(
            "distserve_instance_up",
            "1 while the instance can serve",
            ["instance", "role", "kernels", "tp", "pp"],
            registry=self.registry,
        )
        self._restarts = Counter(
            "distserve_instance_restarts",
            "Times that an instance was started again",
            ["instance"],
            registry=self.registry,
        )
        self._wedged = Counter(
            "distserve_wedged",
            "Times that an instance got nowhere for too long and was replaced",
            ["instance"],
            registry=self.registry,
        )
        self._progress_age = Gauge(
            "distserve_instance_progress_age_seconds",
            "How long ago an instance last answered or, where it has work, last took a step",
            ["instance"],
            registry=self.registry,
        )

    def render(self, phases: Mapping[str, int]) -> tuple[str, bytes]:
        """(content type, exposition). `phases` says how many trips are where at this moment."""
        running = phases.get(Phase.DECODE.name.lower(), 0)
        self._running.set(running)
        self._waiting.set(sum(phases.values()) - running)
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    def arrived(self, request: Request) -> None:
        self._prompt_tokens.inc(len(request.spec.prompt))

    def tokens(self, count: int) -> None:
        self._output_tokens.inc(count)

    def loop_lagged(self, lag_s: float) -> None:
        self._lag.observe(lag_s)

    def refused(self, error: ServeError) -> None:
        """A request that was taken, but never begun, counts as ended too."""
        self._refused.labels(error.code or error.kind).inc()

    def retried(self, num_choices: int) -> None:
        self._retried.inc(num_choices)

    def ended(self, request: Request, phase: Phase) -> None:
        """A request that was taken has ended; latencies count only where an answer was given."""
        self._ended.labels(phase.name.lower()).inc()
        if phase is not Phase.FINISHED:
            return
        for choice in request.choices:
            if choice.finished is not None:
                self._success.labels(self._model, choice.finished.value).inc()
        self._prompt_size.observe(len(request.spec.prompt))
        self._output_size.observe(request.num_output)
        self._observe_times(request)

    def observed(self, instance: str, stats: Stats) -> None:
        for state in _BLOCK_STATES:
            self._blocks.labels(instance, state).set(getattr(stats, f"blocks_{state}"))
        for count in _WORKER_COUNTERS:
            self._worker.labels(instance, count).set(getattr(stats, count))

    def instance_up(self, spec: InstanceSpec, kernels: str) -> None:
        self._up.labels(*_labels(spec, kernels)).set(1)
        self._wedged.labels(spec.name)  # a count of 0 is shown

    def instance_down(self, spec: InstanceSpec, kernels: str) -> None:
        """What a dead incarnation held and did is no more."""
        self._up.labels(*_labels(spec, kernels)).set(0)
        self._progress_age.labels(spec.name).set(0)
        for state in _BLOCK_STATES:
            self._blocks.labels(spec.name, state).set(0)

    def got_on(self, instance: str, age_s: float) -> None:
        """How long ago an instance last got on."""
        self._progress_age.labels(instance).set(age_s)

    def wedged(self, instance: str) -> None:
        self._wedged.labels(instance).inc()

    def restarted(self, instance: str) -> None:
        self._restarts.labels(instance).inc()

    def _observe_times(self, request: Request) -> None:
        clock = request.clock
        if clock.ended_s is None or clock.first_token_s is None or clock.last_token_s is None:
            return
        self._ttft.observe(clock.first_token_s - clock.arrived_s)
        self._e2e.observe(clock.ended_s - clock.arrived_s)
        num_output = max(len(choice.output) for choice in request.choices)
        if num_output > 1:
            self._tpot.observe((clock.last_token_s - clock.first_token_s) / (num_output - 1))
        if (stages := clock.stages) is not None:
            for stage in _STAGES:
                self._stages.labels(stage).observe(getattr(stages, f"{stage}_s"))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model)


def _labels(spec: InstanceSpec, kernels: str) -> tuple[str, str, str, int, int]:
    """Few and fixed: an instance keeps its shape, and a machine has few kinds of kernels."""
    return spec.name, spec.role, kernels, spec.parallelism.tp, spec.parallelism.pp
