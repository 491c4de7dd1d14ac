"""A goodput at a glance: the bracket alone, and a straight line within it.

Good enough to see who is far behind. The interval is the bracket that was found, not a confidence
interval: candidates see the same requests, so their order is surer than their rates.
"""

import math

from planner.goodput import Goodput
from planner.intervals import Interval
from planner.rate_search import RateSearch, Search, log_margin
from planner.verdict import Experiment, RatePoint


def first_look(experiment: Experiment, num_devices: int, search: Search) -> Goodput:
    """The rate between a point that meets the SLO and one that misses it."""
    hunt = RateSearch(experiment, search)
    low, high = hunt.bracket()
    rate = Interval(0.0, 0.0, 0.0)
    if low is not None and high is not None:
        low, high = hunt.narrow(low, high)
        rate = Interval(_between(low, high), low.rate, high.rate)
    elif low is not None:
        rate = Interval(low.rate, low.rate, math.inf)
    return Goodput(
        rate=rate,
        per_device=rate.divided(num_devices),
        target=experiment.slo.attainment,
        limited_by=_missed(high),
        is_bounded=high is not None,
        points=tuple(sorted(hunt.points, key=lambda point: point.rate)),
        num_runs=sum(point.num_runs for point in hunt.points),
    )


def _between(low: RatePoint, high: RatePoint) -> float:
    below, above = log_margin(low), log_margin(high)
    share = below / (below - above) if below < above else 0.0
    return low.rate * math.exp(share * math.log(high.rate / low.rate))


def _missed(high: RatePoint | None) -> str:
    if high is None:
        return "nothing that was tried"
    return "TTFT" if high.ttft_attainment < high.tpot_attainment else "TPOT"
