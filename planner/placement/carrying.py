"""Algorithm 1 with a rate: how many instances of each phase carry it, on the fewest devices.

The paper takes ceil(R / goodput) of each phase (Algorithm 1). A request must meet both targets,
though, and 0.9 of one and 0.9 of the other may be 0.81 of both; several instances behind one
dispatcher carry a little more than as many alone. So the counts around the paper's are simulated
as a whole at the rate, the fewest devices first, until one holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ipc.vocabulary import Role
from planner.deployment import Group
from planner.placement.candidates import counted, max_copies, mixed_counts
from planner.placement.choices import Candidate, Problem
from planner.placement.crew import Crew
from planner.placement.hunt import WAVE, Hunt
from planner.placement.laboratory import CheckRate
from planner.placement.limits import Limits

MOST_TRIED = 120  # compositions; those of more devices are not simulated


@dataclass(frozen=True)
class Composition:
    """Counts of two shapes; `surplus`: what the weaker phase carries alone, over the rate."""

    candidate: Candidate
    surplus: float


def carrying(
    problem: Problem, rate: float, hunt: Hunt, crew: Crew, limits: Limits
) -> list[Candidate]:
    """The placements of the fewest devices that meet the SLO at the rate; none if none does."""
    found: list[Candidate] = []
    tried = _compositions(problem, rate, hunt)[:MOST_TRIED]
    for start in range(0, len(tried), WAVE):
        wave = [each.candidate for each in tried[start : start + WAVE]]
        if found and wave[0].num_devices > found[0].num_devices:
            break
        tasks = [_check(each, rate, hunt, limits) for each in wave]
        points = crew.checks(tasks, "placements at the rate")
        found += [each for each, point in zip(wave, points, strict=True) if point.meets]
        found.sort(key=lambda each: each.num_devices)
    return [each for each in found if each.num_devices == found[0].num_devices]


def _check(candidate: Candidate, rate: float, hunt: Hunt, limits: Limits) -> CheckRate:
    return CheckRate(hunt.setup(candidate), rate, limits.settling(candidate.groups, rate))


def _compositions(problem: Problem, rate: float, hunt: Hunt) -> list[Composition]:
    """Counts of all measured shapes that may carry the rate, fewest devices first."""
    prefills, decodes = (_measured(hunt, role) for role in (Role.PREFILL, Role.DECODE))
    found = [
        each
        for prefill, decode in product(prefills, decodes)
        for each in _counts(problem, rate, (prefill, decode), hunt)
    ]
    return sorted(found, key=lambda each: (each.candidate.num_devices, -each.surplus))


def _measured(hunt: Hunt, role: Role) -> list[Group]:
    return [
        group
        for group, found in hunt.phases.items()
        if group.role is role and group.count == 1 and found.rate.value > 0
    ]


def _counts(
    problem: Problem, rate: float, ones: tuple[Group, Group], hunt: Hunt
) -> Iterator[Composition]:
    """Those of one pair that may do."""
    prefill, decode = ones
    shapes, most = (prefill.parallelism, decode.parallelism), problem.cluster.num_devices
    for n, m in mixed_counts(*shapes, most, most=most):
        carried = hunt.carried(replace(prefill, count=n)), hunt.carried(replace(decode, count=m))
        surplus = min(carried) / rate
        candidate = counted(*shapes, (n, m))
        if surplus >= 1 and max_copies(candidate, problem.cluster):
            yield Composition(candidate, surplus)
