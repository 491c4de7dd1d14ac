"""Closing in on the rate at which the SLO is just met, in as few runs as it takes.

First a bracket: a rate that meets the SLO and one that misses it. Then regula falsi on the log
margin over the log rate, with the Illinois rule against an end that never moves, each try set a
little beyond the estimate so that the next one closes the bracket from the other side.
"""

import math
from dataclasses import dataclass

from planner.errors import TargetError
from planner.verdict import Experiment, RatePoint, attainment_at

BOUND = 1.0  # log margins beyond it say nothing more about where the knee is
WIDE = 3.0  # brackets of a larger ratio are halved: over so much the margin is far from a line
NUM_HALVINGS = 3  # then an all but idle service is asked whether it can meet the SLO at all
NUDGE = 0.4  # of the tolerated width
LOWEST_SHARE = 1e-3  # of a first guess: so low that requests hardly ever meet


@dataclass(frozen=True)
class Search:
    """Where and how closely to look for the rate.

    Args:
        guess: the first rate tried, best some 0.7 of the analytic caps; the number of runs
            depends on it, the answer hardly.
        lowest: so low that requests hardly ever meet.
        highest: where the search stops, such as the rate from which on the service is unstable.
        tolerance: the relative width of a bracket that is narrow enough to interpolate in.
    """

    guess: float = 1.0
    lowest: float = 1e-4
    highest: float = 1e4
    tolerance: float = 0.04

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.guess <= self.highest < math.inf:
            raise TargetError(
                f"a search needs 0 < lowest <= guess <= highest, not {self.lowest:g}, "
                f"{self.guess:g} and {self.highest:g} requests/s"
            )
        if not 0 < self.tolerance < 1:
            raise TargetError(
                f"the tolerance of a rate must lie between 0 and 1, not {self.tolerance:g}"
            )


class RateSearch:
    """The rates tried so far. Once a verdict has taken longer runs, later ones start so long."""

    def __init__(self, experiment: Experiment, search: Search) -> None:
        self.points: list[RatePoint] = []
        self._experiment = experiment
        self._search = search

    @property
    def target(self) -> float:
        return self._experiment.slo.attainment

    @property
    def longest(self) -> list[RatePoint]:
        """The points of the longest runs: those saw the same requests."""
        most = max(point.num_requests for point in self.points)
        return [point for point in self.points if point.num_requests == most]

    def bracket(self) -> tuple[RatePoint | None, RatePoint | None]:
        """A rate that meets the SLO and one that misses it; None where there is none."""
        point = self.at(self._search.guess)
        return self._rise(point) if point.meets else self._descend(point)

    def at(self, rate: float) -> RatePoint:
        """Try one more rate."""
        start = max((point.num_requests for point in self.points), default=None)
        point = attainment_at(self._experiment, rate, start)
        self.points.append(point)
        return point

    def narrow(self, low: RatePoint, high: RatePoint) -> tuple[RatePoint, RatePoint]:
        """The bracket, no wider than tolerated."""
        below, above = log_margin(low), log_margin(high)
        moved_low: bool | None = None
        while high.rate > low.rate * (1 + self._search.tolerance):
            point = self.at(self._between((low.rate, below), (high.rate, above)))
            if point.meets:
                low, below = point, log_margin(point)
                above /= 2 if moved_low else 1
            else:
                high, above = point, log_margin(point)
                below /= 2 if moved_low is False else 1
            moved_low = point.meets
        return low, high

    def _rise(self, low: RatePoint) -> tuple[RatePoint, RatePoint | None]:
        factor = 2.0
        while low.rate < self._search.highest:
            point = self.at(min(low.rate * factor, self._search.highest))
            if not point.meets:
                return low, point
            low, factor = point, 2 * factor
        return low, None

    def _descend(self, high: RatePoint) -> tuple[RatePoint | None, RatePoint]:
        for _ in range(NUM_HALVINGS):
            if high.rate <= self._search.lowest:
                return None, high
            point = self.at(max(high.rate / 2, self._search.lowest))
            if point.meets:
                return point, high
            high = point
        idle = self.at(self._search.lowest)
        return (idle, high) if idle.meets else (None, idle)

    def _between(self, low: tuple[float, float], high: tuple[float, float]) -> float:
        (low_rate, below), (high_rate, above) = low, high
        span = math.log(high_rate / low_rate)
        if high_rate > low_rate * WIDE or above <= below:
            return math.sqrt(low_rate * high_rate)
        width = math.log1p(self._search.tolerance)
        root = span * below / (below - above)
        root += NUDGE * width if root < span / 2 else -NUDGE * width
        least = min(width / 4, span / 2)
        return low_rate * math.exp(min(max(root, least), span - least))


def log_margin(point: RatePoint) -> float:
    """Below zero where the SLO is met, within `BOUND` of it; of an unstable rate, the bound."""
    if not point.is_stable:
        return BOUND
    return min(max(math.log(max(point.margin.value, 1e-9)), -BOUND), BOUND)
