"""Who is best: goodput per device, or fewest devices for a rate; ties go to fewer devices."""

import math
from collections.abc import Sequence

from planner.cluster import Cluster
from planner.intervals import Interval
from planner.placement.candidates import max_copies
from planner.placement.choices import Candidate, Chosen, Evaluated, Objective, Problem
from planner.placement.results import RunnerUp

Worth = tuple[bool, float, float]
"""Whether the cluster has room for the copies that the rate takes; requests/s per device by the
objective; and of the unit alone."""

CLOSE = 0.88  # of the best first look; first looks were within 6 % of closer ones
NUM_BEST = 3  # contenders by goodput ...
NUM_SMALL = 1  # ... and by devices


def worth(candidate: Candidate, rate: float, problem: Problem) -> Worth:
    """What a unit that carries `rate` is worth by the objective; the larger the better.

    Where the fewest devices are sought, per device of as many whole copies as the rate takes.
    """
    per_device = rate / candidate.num_devices
    if problem.rate is None:
        return True, per_device, per_device
    if rate <= 0:
        return False, 0.0, 0.0
    num_copies = _copies_for(problem.rate, rate)
    if num_copies > max_copies(candidate, problem.cluster):
        return False, per_device, per_device
    if problem.objective is Objective.DEVICES:
        return True, problem.rate / (num_copies * candidate.num_devices), per_device
    return True, per_device, per_device


def contenders(found: Sequence[Evaluated], problem: Problem) -> list[Evaluated]:
    """Those that may be the best at a closer look, and the smallest that may tie with it.

    With a rate also those that might need a copy less, if a closer look finds a little more.
    """
    at_face_value = _contenders(found, problem, 1.0)
    if problem.rate is None:
        return at_face_value
    return list(dict.fromkeys([*at_face_value, *_contenders(found, problem, 1 / CLOSE)]))


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
        num_copies = _copies_for(problem.rate, unit.goodput.rate.value)
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


def wins(colocated: Chosen, disaggregated: Chosen, problem: Problem) -> bool:
    """Colocated: on fewer devices where those are sought, else beyond the intervals."""
    is_by_devices = problem.objective is Objective.DEVICES
    if is_by_devices and colocated.num_devices != disaggregated.num_devices:
        return colocated.num_devices < disaggregated.num_devices
    return is_surely_more(colocated.best.per_device, disaggregated.best.per_device)


def is_surely_more(first: Interval, second: Interval) -> bool:
    """Neither estimate lies within the other's interval."""
    return first.value > second.high and first.low > second.value


def ratio(first: Interval, second: Interval) -> Interval:
    """first / second, both positive; the ends' distances on a log scale add in squares, as of
    independent estimates."""
    value = first.value / second.value
    down = _spread(first.value, first.low, second.high, second.value)
    up = _spread(first.high, first.value, second.value, second.low)
    return Interval(value, value * math.exp(-down), value * math.exp(up))


def _contenders(found: Sequence[Evaluated], problem: Problem, factor: float) -> list[Evaluated]:
    """By their goodput times the factor."""
    rated = {
        each: worth(each.candidate, factor * each.goodput.rate.value, problem)
        for each in by_goodput(found)
        if each.per_device.value > 0
    }
    if not rated:
        return []
    ranked = sorted(rated, key=lambda each: rated[each], reverse=True)  # stable: ties as they were
    fits, value, _ = rated[ranked[0]]
    close = [each for each in ranked if rated[each] >= (fits, CLOSE * value, 0.0)]
    rest = sorted(close[NUM_BEST:], key=lambda each: each.candidate.num_devices)
    return close[:NUM_BEST] + rest[:NUM_SMALL]


def _copies_for(rate: float, each: float) -> int:
    return max(1, math.ceil(rate / each))


def _spread(above: float, below: float, other_above: float, other_below: float) -> float:
    """sqrt(log^2 + log^2) of two ratios, infinite where an end is not known."""
    if min(below, other_below) <= 0 or math.inf in (above, other_above):
        return math.inf
    return math.hypot(math.log(above / below), math.log(other_above / other_below))
