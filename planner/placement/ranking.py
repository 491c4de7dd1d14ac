"""Who is best: goodput per device, or fewest devices for a rate; ties go to fewer devices."""

import math
from collections.abc import Sequence

from planner.cluster import Cluster
from planner.intervals import Interval
from planner.placement.candidates import max_copies
from planner.placement.choices import Chosen, Evaluated, Objective, Problem
from planner.placement.results import RunnerUp

CLOSE = 0.88  # of the best first look; first looks were within 6 % of closer ones
NUM_BEST = 3  # contenders by goodput ...
NUM_SMALL = 1  # ... and by devices


def contenders(found: Sequence[Evaluated]) -> list[Evaluated]:
    """Those that may be the best at a closer look, and the smallest that may tie with it."""
    ranked = by_goodput([each for each in found if each.per_device.value > 0])
    if not ranked:
        return []
    enough = CLOSE * ranked[0].per_device.value
    close = [each for each in ranked if each.per_device.value >= enough]
    rest = sorted(close[NUM_BEST:], key=lambda each: each.candidate.num_devices)
    return close[:NUM_BEST] + rest[:NUM_SMALL]


def by_goodput(found: Sequence[Evaluated]) -> list[Evaluated]:
    """Highest per device first; of equals the smaller one."""
    return sorted(found, key=lambda each: (-each.per_device.value, each.candidate.num_devices))


def best_of(found: Sequence[Evaluated]) -> Evaluated | None:
    """The smallest of those within the leader's interval; the leader where none is smaller."""
    ranked = by_goodput([each for each in found if each.per_device.value > 0])
    if not ranked:
        return None
    ties = [each for each in ranked if is_tie(each, ranked[0])]
    return min(ties, key=lambda each: (each.candidate.num_devices, -each.per_device.value))


def is_tie(one: Evaluated, leader: Evaluated) -> bool:
    """Its estimate is as good as the leader's may be, and no first look against a close one."""
    return one.per_device.value >= leader.per_device.low and one.is_rough <= leader.is_rough


def runner_ups(found: Sequence[Evaluated], best: Evaluated) -> tuple[RunnerUp, ...]:
    """All others that carry anything, the best first."""
    others = [each for each in found if each is not best and each.per_device.value > 0]
    return tuple(RunnerUp(each, is_tie(each, best)) for each in by_goodput(others))


def chosen(unit: Evaluated, problem: Problem) -> Chosen | None:
    """Copies of the unit for the rate, ceil(R / goodput) of them (paper section 4.1), or one.

    None where the cluster has no room for so many.
    """
    num_copies = 1
    if problem.rate is not None:
        num_copies = math.ceil(problem.rate / unit.goodput.rate.value)
    if num_copies > max_copies(unit.candidate, problem.cluster):
        return None
    rate = unit.goodput.rate
    total = Interval(num_copies * rate.value, num_copies * rate.low, num_copies * rate.high)
    return Chosen(unit, num_copies, total)


def best_choice(found: Sequence[Evaluated], problem: Problem) -> Chosen | None:
    """By the objective; None where nothing carries anything, or not the rate."""
    if problem.rate is None:
        unit = best_of(found)
        return chosen(unit, problem) if unit is not None else None
    able = [each for each in found if each.per_device.value > 0]
    choices = [each for unit in able if (each := chosen(unit, problem)) is not None]
    if not choices:
        return None
    if problem.objective is Objective.DEVICES:
        return min(choices, key=lambda each: (each.num_devices, -each.best.per_device.value))
    unit = best_of([each.best for each in choices])
    return next(each for each in choices if each.best is unit)


def most_carried(found: Sequence[Evaluated], cluster: Cluster) -> float:
    """Requests per second of the whole cluster, filled with copies of one unit."""
    return max(
        (each.goodput.rate.value * max_copies(each.candidate, cluster) for each in found),
        default=0.0,
    )


def ratio(first: Interval, second: Interval) -> Interval:
    """first / second, both positive; the ends' distances on a log scale add in squares, as of
    independent estimates."""
    value = first.value / second.value
    down = _spread(first.value, first.low, second.high, second.value)
    up = _spread(first.high, first.value, second.value, second.low)
    return Interval(value, value * math.exp(-down), value * math.exp(up))


def _spread(above: float, below: float, other_above: float, other_below: float) -> float:
    """sqrt(log^2 + log^2) of two ratios, infinite where an end is not known."""
    if min(below, other_below) <= 0 or math.inf in (above, other_above):
        return math.inf
    return math.hypot(math.log(above / below), math.log(other_above / other_below))
