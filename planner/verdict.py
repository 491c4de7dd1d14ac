"""Does a service meet its SLO at this rate? As many requests as the answer takes, no more.

A run counts the requests of its steady window alone. Both ends are off: the first requests find
an empty house, the last ones decode while it empties. Before anything is counted the run must be
stable: a queue that grows has no long-run attainment but zero, whatever its first thousand
requests say (the reference search's 300 requests, for one, pass at rates that later fail).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from planner.errors import TargetError
from planner.intervals import NUM_BATCHES, Interval, percentile, share, student_t
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.workload.requests import Floats, Requests

Run = Callable[[Requests], Timeline]
Draw = Callable[[int, float, int], Requests]  # how many, at which rate, from which seed

WARM_UP_SHARE = 0.1
MAX_WARM_UP_SHARE = 0.3
MAX_DRAIN_SHARE = 0.2
GROWTH_LIMIT = 0.02  # seconds of queueing gained in each second of arrivals
GROWTH_CONFIDENCE = 0.99
VERDICT_CONFIDENCE = 0.99  # stricter than what is reported: there are several looks at a run


class Verdict(StrEnum):
    MEETS = "meets"
    MISSES = "misses"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Effort:
    """How many requests a run has: `start`, doubled up to `cap` while nothing is clear.

    It is clear when the queue grows, when the attainment's 99 % interval leaves out the target,
    or when the 95 % interval is within `half_width` of the estimate on either side.
    """

    start: int = 2_000
    cap: int = 32_000
    half_width: float = 0.01

    def __post_init__(self) -> None:
        if not 100 <= self.start <= self.cap:
            raise TargetError(
                f"a run needs at least 100 requests and no more than its cap of {self.cap}, "
                f"not {self.start}"
            )


@dataclass(frozen=True)
class Experiment:
    """A service under a workload, and what is asked of it.

    `draw` must give the same requests but for their arrival times at every rate (common random
    numbers), and a longer draw must begin with the shorter one: then attainment hardly wavers as
    the rate grows.
    """

    run: Run
    draw: Draw
    slo: Slo
    seed: int = 0
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True)
class Window:
    """The requests that count, and whether the run was long enough to leave both its ends out."""

    first: int
    last: int
    is_settled: bool

    @property
    def counted(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True)
class Latency:
    """Percentiles in seconds."""

    p50: Interval
    p90: Interval
    p99: Interval


@dataclass(frozen=True)
class RatePoint:
    """What a rate gives.

    Args:
        margin: the latency, as a multiple of the SLO, that the target share does not exceed: the
            smallest SLO scale that would do (paper section 6.2). At most one where the SLO is met.
        queue_growth: seconds of queueing gained in each second of arrivals; of an unstable run
            the attainment and the latencies are those of its first `num_requests` requests.
    """

    rate: float
    verdict: Verdict
    attainment: Interval
    ttft_attainment: float
    tpot_attainment: float
    margin: Interval
    ttft: Latency
    tpot: Latency
    is_stable: bool
    queue_growth: float
    num_requests: int
    num_counted: int
    num_runs: int

    @property
    def meets(self) -> bool:
        """The best guess, be it clear or not."""
        return self.is_stable and self.margin.value <= 1


def attainment_at(experiment: Experiment, rate: float, start: int | None = None) -> RatePoint:
    """Runs of doubling length, from `start` requests on, until it is clear or the effort spent.

    Among the runs that stop early because they look clear are the lucky ones, so that their 95 %
    intervals cover too little (85 % measured on M/D/1 at a load of 0.9). They are given the 99 %
    interval that the decision was made on, as repeated looks ask for.
    """
    effort = experiment.effort
    num_requests = min(start or effort.start, effort.cap)
    num_runs = 1
    while not (look := _look(experiment, rate, num_requests)).is_clear:
        if num_requests >= effort.cap:
            break
        num_requests, num_runs = min(2 * num_requests, effort.cap), num_runs + 1
    return look.point(experiment, rate, num_runs)


def steady(timeline: Timeline) -> Window:
    """The requests to count: not those of the warm-up, nor those of the drain.

    The warm-up is the first tenth, or what arrives within one lifetime of a request (its 90th
    percentile) if that is more: so long it takes until as many leave as come. Whoever arrived
    later than one such lifetime before the last arrival may have decoded in an emptying house.
    Arrivals are dropped, never late finishers: those would take the slow ones with them. Each end
    is bounded, and a run that exceeds a bound has not settled.
    """
    arrival_s = timeline.requests.arrival_s
    count = len(timeline)
    lifetime_s = float(np.quantile(timeline.last_token_s - arrival_s, 0.9))
    first = int(np.searchsorted(arrival_s, arrival_s[0] + lifetime_s))
    last = int(np.searchsorted(arrival_s, arrival_s[-1] - lifetime_s, side="right"))
    latest_first, earliest_last = int(count * MAX_WARM_UP_SHARE), int(count * (1 - MAX_DRAIN_SHARE))
    is_settled = first <= latest_first and last >= earliest_last
    first = min(max(first, int(count * WARM_UP_SHARE)), latest_first)
    return Window(first, max(last, earliest_last, first + 1), is_settled)


def queue_growth(timeline: Timeline) -> tuple[float, bool]:
    """Seconds of queueing gained in each second of arrivals, and whether that is a verdict.

    The waits of both queues, by arrival, in eight batches after the warm-up: where work comes in
    faster than it goes out each batch waits longer than the one before it, by the same amount.
    Latencies would not do: they also grow while a large decode batch first fills up.
    """
    stages = timeline.stages_s()
    start = int(len(timeline) * WARM_UP_SHARE)
    gains_s = np.diff(_batch_means((stages["prefill_queue"] + stages["decode_queue"])[start:]))
    spans_s = np.diff(_batch_means(timeline.requests.arrival_s[start:]))
    span_s = float(spans_s.mean())
    if span_s <= 0:
        return 0.0, False
    gain_s = float(gains_s.mean())
    error_s = float(gains_s.std(ddof=1)) / len(gains_s) ** 0.5
    quantile = student_t(GROWTH_CONFIDENCE, len(gains_s) - 1)
    growth = gain_s / span_s
    return growth, growth > GROWTH_LIMIT and gain_s > quantile * error_s


def margins(timeline: Timeline, slo: Slo) -> Floats:
    """The smallest SLO scale that each request would meet, float64[N]."""
    return np.maximum(timeline.ttft_s / slo.ttft_s, timeline.tpot_s / slo.tpot_s)


@dataclass(frozen=True)
class _Look:
    """One run, and what it says."""

    timeline: Timeline
    window: Window
    verdict: Verdict
    attainment: Interval
    is_clear: bool

    def point(self, experiment: Experiment, rate: float, num_runs: int) -> RatePoint:
        slo, counted = experiment.slo, self.window.counted
        ttft_s, tpot_s = self.timeline.ttft_s[counted], self.timeline.tpot_s[counted]
        growth, grows = queue_growth(self.timeline)
        return RatePoint(
            rate=rate,
            verdict=self.verdict,
            attainment=self.attainment,
            ttft_attainment=float((ttft_s <= slo.ttft_s).mean()),
            tpot_attainment=float((tpot_s <= slo.tpot_s).mean()),
            margin=percentile(margins(self.timeline, slo)[counted], slo.attainment),
            ttft=_latency(ttft_s),
            tpot=_latency(tpot_s),
            is_stable=not grows,
            queue_growth=growth,
            num_requests=len(self.timeline),
            num_counted=len(ttft_s),
            num_runs=num_runs,
        )


def _look(experiment: Experiment, rate: float, num_requests: int) -> _Look:
    timeline = experiment.run(_drawn(experiment, rate, num_requests))
    window, slo = steady(timeline), experiment.slo
    hits, signal = timeline.meets(slo)[window.counted], margins(timeline, slo)[window.counted]
    found = share(hits, signal)
    if queue_growth(timeline)[1]:
        return _Look(timeline, window, Verdict.MISSES, found, is_clear=True)
    strict = share(hits, signal, VERDICT_CONFIDENCE)
    if window.is_settled and not strict.low <= slo.attainment <= strict.high:
        verdict = Verdict.MEETS if strict.low > slo.attainment else Verdict.MISSES
        stops_early = num_requests < experiment.effort.cap
        return _Look(timeline, window, verdict, strict if stops_early else found, is_clear=True)
    is_sharp = window.is_settled and found.half_width < experiment.effort.half_width
    return _Look(timeline, window, Verdict.UNDECIDED, found, is_clear=is_sharp)


def _drawn(experiment: Experiment, rate: float, num_requests: int) -> Requests:
    if not 0 < rate < np.inf:
        raise TargetError(f"a request rate must be above zero and finite, not {rate:g}")
    return experiment.draw(num_requests, rate, experiment.seed)


def _latency(seconds: Floats) -> Latency:
    return Latency(percentile(seconds, 0.5), percentile(seconds, 0.9), percentile(seconds, 0.99))


def _batch_means(values: Floats) -> Floats:
    size = len(values) // NUM_BATCHES
    batches: Floats = values[: size * NUM_BATCHES].reshape(NUM_BATCHES, size).mean(axis=1)
    return batches
