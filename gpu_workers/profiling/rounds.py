"""Sample many things in rounds, so that a noisy minute spoils a sample of each and not a few whole.

Knows nothing of steps: it is given functions that do something once and say how many milliseconds
that took. The clock is passed in.
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)

Once = Callable[[], float]
Progress = Callable[[float], None]

NORMAL_MEDIAN = 0.6745  # of |x|, for x normal with standard deviation 1


class Budget(msgspec.Struct, frozen=True):
    """Bounds: seconds in all, seconds of one visit to a quick point, and rounds.

    The first round is always completed, whatever it takes.
    """

    total_s: float
    visit_s: float
    max_rounds: int


def sample_in_rounds(
    points: Mapping[Key, Once],
    budget: Budget,
    *,
    progress: Progress = lambda fraction: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """The milliseconds of every run of every point, in the order in which they were taken.

    Rounds visit the points in another order each. A visit repeats a quick point until `visit_s`
    has passed. A point whose single run takes longer than an even share of the whole time sits
    rounds out until that is made up for: long runs average the noise out by themselves.
    """
    sampler = _Sampler(points, budget, clock)
    shuffled, order = random.Random(0), list(points)
    for number in range(budget.max_rounds):
        shuffled.shuffle(order)
        for point in order:
            progress(min(1.0, sampler.elapsed_s / budget.total_s))
            if number == 0 or sampler.is_due(point, number):
                sampler.visit(point)
    progress(1.0)
    return sampler.samples


class _Sampler(Generic[Key]):
    """What was sampled, and what it took."""

    def __init__(
        self, points: Mapping[Key, Once], budget: Budget, clock: Callable[[], float]
    ) -> None:
        self.samples: dict[Key, list[float]] = {point: [] for point in points}
        self._points, self._budget, self._clock = points, budget, clock
        self._share_s = budget.total_s / max(1, len(points))
        self._spent_s = dict.fromkeys(points, 0.0)
        self._started_s = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def is_due(self, point: Key, number: int) -> bool:
        """Whether the point has not had more than its share, and would end in time."""
        has_had = self._spent_s[point] > number * self._share_s
        last_s = self.samples[point][-1] / 1000
        return not has_had and self.elapsed_s + last_s <= self._budget.total_s

    def visit(self, point: Key) -> None:
        began_s = self._clock()
        while True:
            self.samples[point].append(self._points[point]())
            taken_s = self._clock() - began_s
            if taken_s >= self._budget.visit_s:
                break
        self._spent_s[point] += taken_s


def settled_median(samples: Sequence[float]) -> float:
    return statistics.median(settled(samples))


def settled(samples: Sequence[float]) -> Sequence[float]:
    """All but the first, which warmed up whatever this shape needs; if there are others."""
    return samples[1:] or samples


def relative_spread(samples: Iterable[Sequence[float]]) -> float:
    """The relative standard deviation of repeats, from the median of their successive differences.

    Differences of neighbours leave slow drifts out and need no mean, so a few samples of many
    points can be pooled; the median leaves out the few that something else got in the way of.
    For normal noise |x - y| has the median NORMAL_MEDIAN * sqrt(2) standard deviations.
    """
    differences = [
        abs(later - earlier) / settled_median(repeats)
        for repeats in samples
        for earlier, later in zip(settled(repeats), settled(repeats)[1:], strict=False)
    ]
    if not differences:
        return 0.0
    return float(statistics.median(differences) / (NORMAL_MEDIAN * 2**0.5))
