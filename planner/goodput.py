"""Goodput: the highest rate at which enough requests meet both targets (paper section 2.1).

The search works on the *margin*, the SLO scale at which exactly the target share would pass. It
is below one where the attainment is above its target, but it still tells how far off a rate is
where everybody passes or nobody does, so a bracketed secant closes in quickly. Every rate sees
the same requests (common random numbers), and the answer has an interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import TargetError
from planner.intervals import Interval, percentile, share
from planner.rate_interval import rate_interval
from planner.rate_search import RateSearch, Search
from planner.verdict import (
    Experiment,
    RatePoint,
    attainment_at,
    margins,
    queue_growth,
    steady,
)


@dataclass(frozen=True)
class Goodput:
    """Requests per second, for the whole service and per device, with 95 % intervals.

    Args:
        limited_by: what fails first beyond it, or why it is zero, in words.
        is_bounded: false where even the highest rate still met the SLO; the rate is that one.
        points: all rates that were tried, in rising order.
    """

    rate: Interval
    per_device: Interval
    target: float
    limited_by: str
    is_bounded: bool
    points: tuple[RatePoint, ...]
    num_runs: int


@dataclass(frozen=True)
class ScalePoint:
    """Attainment with both targets multiplied by `scale`."""

    scale: float
    attainment: Interval


@dataclass(frozen=True)
class ScaleSweep:
    """Attainment over SLO scales at one rate, and the smallest scale that reaches the target:
    infinite where the service is unstable (paper section 6.2)."""

    rate: float
    points: tuple[ScalePoint, ...]
    minimal_scale: Interval
    is_stable: bool


def goodput(experiment: Experiment, num_devices: int, search: Search | None = None) -> Goodput:
    """The goodput under the experiment's SLO and its attainment target."""
    if num_devices < 1:
        raise TargetError(f"goodput per device needs at least one device, not {num_devices}")
    hunt = RateSearch(experiment, search or Search())
    low, high = hunt.bracket()
    rate = Interval(0.0, 0.0, 0.0)
    if low is not None and high is not None:
        low, high = hunt.narrow(low, high)
        rate = rate_interval(hunt, low, high)
    elif low is not None:
        rate = Interval(low.rate, low.rate, math.inf)
    return Goodput(
        rate=rate,
        per_device=rate.divided(num_devices),
        target=experiment.slo.attainment,
        limited_by=_limit(low, high, experiment.slo.attainment),
        is_bounded=high is not None,
        points=tuple(sorted(hunt.points, key=lambda point: point.rate)),
        num_runs=sum(point.num_runs for point in hunt.points),
    )


def curve(experiment: Experiment, rates: Sequence[float]) -> tuple[RatePoint, ...]:
    """Attainment and latencies, with their bands, at each rate."""
    return tuple(attainment_at(experiment, rate) for rate in rates)


def slo_sweep(experiment: Experiment, rate: float, scales: Sequence[float]) -> ScaleSweep:
    """One run of the effort's cap serves all scales: latencies know nothing of the SLO."""
    if not all(scale > 0 for scale in scales):
        raise TargetError("every SLO scale must be above zero")
    slo, seed = experiment.slo, experiment.seed
    timeline = experiment.run(experiment.draw(experiment.effort.cap, rate, seed))
    signal = margins(timeline, slo)[steady(timeline).counted]
    is_stable = not queue_growth(timeline)[1]
    minimal = percentile(signal, slo.attainment)
    return ScaleSweep(
        rate=rate,
        points=tuple(ScalePoint(scale, share(signal <= scale, signal)) for scale in scales),
        minimal_scale=minimal if is_stable else Interval(math.inf, math.inf, math.inf),
        is_stable=is_stable,
    )


def _limit(low: RatePoint | None, high: RatePoint | None, share_wanted: float) -> str:
    if high is None:
        return f"nothing up to {low.rate:g} requests/s" if low else "nothing"
    if not high.is_stable and min(high.ttft_attainment, high.tpot_attainment) >= share_wanted:
        return "throughput: queues grow without end"  # before either target is missed
    target = "TTFT" if high.ttft_attainment < high.tpot_attainment else "TPOT"
    if low is None:
        return f"{target}: missed even at {high.rate:g} requests/s"
    return target if high.is_stable else f"{target}: queues grow without end"
