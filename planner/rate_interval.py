"""How sure a goodput is: all rates at which the attainment could as well be the target.

A rate belongs to the interval where the target lies within that rate's own 95 % interval of the
attainment, so the true one belongs to it as often as those intervals cover. A few more runs look
for both ends; between the rates tried the ends of the attainment's interval are straight lines.
(Reading both ends off at the estimate alone covers too little: a lucky run looks less bursty
than it is, and at a lower rate it would have known more.)
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from planner.intervals import Interval
from planner.rate_search import RateSearch, log_margin
from planner.verdict import RatePoint

MOST_SHIFT = 0.3  # of the log rate, by which an end is first sought away from the estimate
LEAST_SHIFT = 0.01
NUM_PROBES = 3  # on each side

Excess = Callable[[RatePoint], float]


def rate_interval(hunt: RateSearch, low: RatePoint, high: RatePoint) -> Interval:
    """The rate between the ends of the bracket where the margin is one, and its interval."""
    below, above = log_margin(low), log_margin(high)
    span = math.log(high.rate / low.rate)
    root = low.rate * math.exp(span * below / (below - above) if below < above else 0.0)
    slope = max((above - below) / span, 1.0)
    margin = max(high, low, key=lambda point: point.num_requests).margin
    target = hunt.target

    def surely_met(point: RatePoint) -> float:
        return point.attainment.low - target if point.is_stable else -target

    def surely_missed(point: RatePoint) -> float:
        return target - point.attainment.high if point.is_stable else target

    earliest = _end(hunt, root, -_shift(margin.high / margin.value, slope), surely_met)
    latest = _end(hunt, root, _shift(margin.value / margin.low, slope), surely_missed)
    return Interval(root, min(earliest, low.rate), max(latest, high.rate))


def _end(hunt: RateSearch, root: float, shift: float, excess: Excess) -> float:
    """The rate nearest to the root, on the shift's side, from which on the excess is positive;
    the farthest one tried where it never is."""
    for _ in range(NUM_PROBES):
        if any(excess(point) > 0 for point in _beyond(hunt.longest, root, shift)):
            break
        hunt.at(root * math.exp(shift))
        shift *= 2
    curve = _beyond(hunt.longest, root, shift)
    for nearer, farther in pairwise(curve):
        if excess(farther) > 0:
            share = max(-excess(nearer), 0.0) / (excess(farther) - min(excess(nearer), 0.0))
            return float(nearer.rate * (farther.rate / nearer.rate) ** share)
    return curve[-1].rate


def _beyond(points: Sequence[RatePoint], root: float, shift: float) -> list[RatePoint]:
    """The points on one side of the root, the nearest first."""
    sign = math.copysign(1.0, shift)
    there = [point for point in points if (point.rate - root) * sign >= 0]
    return sorted(there, key=lambda point: point.rate * sign)


def _shift(ratio: float, slope: float) -> float:
    return min(max(math.log(ratio) / slope, LEAST_SHIFT), MOST_SHIFT)
