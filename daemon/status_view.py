"""What the status page shows, gathered once for all who look: declared types, counts and seconds.

Its cost has a bound: lists are cut, finished steps of the charts are kept, and it is made anew at
most twice a second however many pages are open. No prompt, no answer and no key is in it.
"""

import time
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from daemon.admin_views import BlockCounts
from daemon.controller import Controller
from daemon.live_metrics import worker_state
from daemon.metrics import WINDOWS_S, Metrics
from daemon.node import Node, block_counts
from daemon.request import ENDED, Request
from daemon.slo import SLOT_S, Targets, WindowReport
from daemon.supervisor import Supervisor
from daemon.timelines import state_of
from daemon.ward import Ward
from ipc.messages import Stats
from ipc.vocabulary import Role, Segment

VIEW_VERSION = 1
MAX_REQUESTS = 20
CHART_S = 300.0
STEP_S = 2 * SLOT_S
_FRESH_S = 0.5


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `state` is one word, `detail` more of them where there is more to say;
    `progress_age_s` is None while it is not up."""

    name: str
    role: Role
    state: str
    detail: str
    tp: int
    pp: int
    segments: tuple[Segment, ...]
    queue_tokens: int
    num_waiting: int
    num_running: int
    blocks: BlockCounts
    num_pulls: int
    num_restarts: int
    last_exit: str | None
    progress_age_s: float | None


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request under way. `label` is what the client calls it, if anything."""

    number: int
    label: str
    state: str
    instance: str | None
    num_prompt: int
    num_output: int
    num_retries: int
    age_s: float


class WindowView(msgspec.Struct, frozen=True, kw_only=True):
    """How the SLO was met in a window, or in one step of a chart; None where nothing ended."""

    window_s: float
    num_requests: int
    attainment: float | None
    goodput_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one moment. `refusal` says why nothing can be served, if so."""

    v: int = VIEW_VERSION
    model: str
    version: str
    pid: int
    state: str
    refusal: str | None
    uptime_s: float
    trips: dict[str, int]
    num_open: int
    num_arrived: int
    num_retried: int
    ended: dict[str, int]
    refused: dict[str, int]
    targets: Targets
    windows: dict[str, WindowView]
    chart_step_s: float = STEP_S
    chart: tuple[WindowView, ...]
    instances: tuple[InstanceView, ...]
    requests: tuple[RequestView, ...]


class StatusBoard:
    """Makes `StatusView`s of the node's parts. `clock` is the controller's."""

    def __init__(
        self,
        node: Node,
        controller: Controller,
        supervisor: Supervisor,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._controller = controller
        self._supervisor = supervisor
        self._metrics = metrics
        self._clock = clock
        self._steps: dict[int, WindowView] = {}  # of the chart, those that are over
        self._made_s = float("-inf")
        self._body = b""

    @property
    def body(self) -> bytes:
        """The view as JSON."""
        if (now_s := self._clock()) - self._made_s >= _FRESH_S:
            self._body, self._made_s = msgspec.json.encode(self.view()), now_s
        return self._body

    def view(self) -> StatusView:
        now_s, tally, slo = self._clock(), self._metrics.tally, self._metrics.slo
        status = self._node.status()
        refusal = self._node.refusal
        return StatusView(
            model=status.model,
            version=status.version,
            pid=status.pid,
            state=status.state.value,
            refusal=None if refusal is None else refusal.message,
            uptime_s=status.uptime_s,
            trips=status.requests,
            num_open=self._controller.num_open,
            num_arrived=tally.num_arrived,
            num_retried=tally.num_retried,
            ended={phase.name.lower(): count for phase, count in tally.ended.items()},
            refused=dict(tally.refused),
            targets=slo.targets,
            windows={w: _window(slo.report(now_s, s)) for w, s in WINDOWS_S.items()},
            chart=tuple(self._chart(now_s)),
            instances=tuple(map(self._instance, self._supervisor.wards.values())),
            requests=tuple(self._requests(now_s)),
        )

    def _chart(self, now_s: float) -> Iterator[WindowView]:
        """Oldest first. Only the present step and those that are new are summed."""
        last = int(now_s // STEP_S)
        first = last - round(CHART_S / STEP_S) + 1
        kept = {number: step for number, step in self._steps.items() if number >= first}
        for number in range(first, last):
            if number not in kept:
                kept[number] = self._step(number)
        self._steps = kept
        yield from (kept[number] for number in range(first, last))
        yield self._step(last)

    def _step(self, number: int) -> WindowView:
        end_s = (number + 1) * STEP_S - SLOT_S / 2  # within the last slot of that step
        return _window(self._metrics.slo.report(end_s, STEP_S))

    def _instance(self, ward: Ward) -> InstanceView:
        known = self._controller.instances.get(ward.spec.name)
        stats = known.stats if known else Stats()
        word = worker_state(ward)
        return InstanceView(
            name=ward.spec.name,
            role=ward.spec.role,
            state="draining" if known and known.is_draining else word,
            detail="" if ward.state == word else ward.state,
            tp=ward.spec.parallelism.tp,
            pp=ward.spec.parallelism.pp,
            segments=tuple(ward.spec.segments),
            queue_tokens=known.prefill_load.queued_tokens if known else 0,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            blocks=block_counts(stats),
            num_pulls=stats.num_pulls,
            num_restarts=ward.restarts,
            last_exit=ward.last_exit,
            progress_age_s=self._metrics.tally.progress_age_s.get(ward.spec.name),
        )

    def _requests(self, now_s: float) -> Iterator[RequestView]:
        """The oldest ones."""
        for request in islice(self._controller.timelines.open_requests(), MAX_REQUESTS):
            yield RequestView(
                number=request.arrival,
                label=request.label,
                state=state_of(request),
                instance=_whereabouts(request),
                num_prompt=len(request.spec.prompt),
                num_output=request.num_output,
                num_retries=max((trip.num_retries for trip in request.trips), default=0),
                age_s=now_s - request.clock.arrived_s,
            )


def _whereabouts(request: Request) -> str | None:
    """Which instance has its first trip that has not ended."""
    return next((t.instance for t in request.trips if t.phase not in ENDED), None)


def _window(report: WindowReport) -> WindowView:
    return WindowView(
        window_s=report.window_s,
        num_requests=report.num_requests,
        attainment=report.attainment,
        goodput_per_s=report.goodput_per_s,
        ttft_p50_s=report.ttft.p50_s,
        ttft_p90_s=report.ttft.p90_s,
        ttft_p99_s=report.ttft.p99_s,
        tpot_p50_s=report.tpot.p50_s,
        tpot_p90_s=report.tpot.p90_s,
        tpot_p99_s=report.tpot.p99_s,
    )
