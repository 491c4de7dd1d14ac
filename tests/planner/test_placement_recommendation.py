"""What is recommended where a rate is given, and what low affinity refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group
from planner.errors import ProfileError
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.latency.choose import Knowledge
from planner.latency.interface import Source
from planner.placement import field
from planner.placement.advice import for_it
from planner.placement.candidates import pair
from planner.placement.choices import (
    Affinity,
    Candidate,
    Chosen,
    Dropped,
    Evaluated,
    Objective,
    Problem,
    System,
)
from planner.placement.hunt import Item
from planner.placement.known_shapes import KnownShapes
from planner.placement.laboratory import Laboratory
from planner.placement.limits import Limits
from planner.placement.options import Options
from planner.placement.ranking import chosen, contenders, wins, worth
from planner.placement.search import search
from tests.planner.profile_tables import profile_table, written
from tests.planner.small_clusters import quick, small_problem

ONE = Parallelism()


def mixed(num_instances: int = 1) -> Candidate:
    return Candidate(System.PREFILL_FIRST, (Group(Role.MIXED, num_instances, ONE),))


def evaluated(candidate: Candidate, per_device: float, half_width: float = 0.01) -> Evaluated:
    each = Interval(per_device, per_device - half_width, per_device + half_width)
    rate = each.divided(1 / candidate.num_devices)
    return Evaluated(candidate, Goodput(rate, each, 0.9, "TPOT", True, (), 1))


def at_rate(rate: float, objective: Objective = Objective.GOODPUT) -> Problem:
    return small_problem(1, 8, affinity=Affinity.LOW, rate=rate, objective=objective)


def placed(unit: Evaluated, problem: Problem) -> Chosen:
    found = chosen(unit, problem)
    assert found is not None
    return found


def test_on_equal_devices_the_better_service_wins() -> None:
    """It used to be the disaggregated one, for devices alone were counted."""
    problem = at_rate(1.5, Objective.DEVICES)
    together = placed(evaluated(mixed(2), 1.0), problem)
    apart = placed(evaluated(pair(ONE, ONE), 0.8), problem)
    assert together.num_devices == apart.num_devices
    assert wins(together, apart, problem)
    assert not wins(placed(evaluated(mixed(2), 0.8), problem), apart, problem)


def test_fewer_devices_win_where_those_are_sought_and_goodput_where_that_is() -> None:
    by_devices, by_goodput = at_rate(0.8, Objective.DEVICES), at_rate(0.8)
    together = placed(evaluated(mixed(), 0.9), by_devices)
    apart = placed(evaluated(pair(ONE, ONE), 1.2), by_devices)
    assert (together.num_devices, apart.num_devices) == (1, 2)
    assert wins(together, apart, by_devices)
    assert not wins(together, apart, by_goodput)


def test_a_colocated_service_that_carries_more_per_device_is_not_called_uncertain() -> None:
    problem = at_rate(1.5, Objective.DEVICES)
    apart = placed(evaluated(pair(ONE, ONE), 0.8), problem)
    together = placed(evaluated(mixed(3), 1.0), problem)
    first, second = for_it(problem, apart, together, was_sought=True)
    assert first == (
        "the best colocated service carries 1.25 times as much per device: 0.8 against 1 requests/s"
    )
    assert second == "the rate takes 2 devices so, and 3 with the best colocated service"


def test_overlapping_ranges_are_called_uncertain() -> None:
    problem = small_problem(1, 8)
    apart = placed(evaluated(pair(ONE, ONE), 1.05, 0.1), problem)
    (told,) = for_it(problem, apart, placed(evaluated(mixed(), 1.0), problem), was_sought=True)
    assert "within the uncertainty" in told


def test_a_unit_is_worth_what_it_carries_in_whole_copies_where_devices_are_sought() -> None:
    small, large = pair(ONE, ONE), pair(Parallelism(2), Parallelism(2))
    problem = at_rate(2.0, Objective.DEVICES)
    assert worth(small, 1.9, problem)[:2] == worth(large, 4.0, problem)[:2] == (True, 0.5)
    assert worth(small, 2.0, problem)[:2] == (True, 1.0)


def test_copies_that_the_cluster_has_no_room_for_are_worth_less_than_any_that_fit() -> None:
    large, small = pair(Parallelism(4), ONE), pair(ONE, ONE)  # one of five fits eight, four of two
    problem = at_rate(6.0)
    assert worth(large, 5.0, problem) < worth(small, 1.5, problem)
    assert worth(large, 5.0, small_problem(1, 8)) > worth(small, 1.5, small_problem(1, 8))


def test_the_unit_that_needs_the_fewest_devices_is_a_contender_whatever_its_goodput() -> None:
    large = evaluated(pair(Parallelism(4), Parallelism(4)), 1.0)
    small = evaluated(pair(ONE, ONE), 0.7)
    assert small not in contenders([large, small], at_rate(1.2))
    assert small in contenders([large, small], at_rate(1.2, Objective.DEVICES))


def fixed_field(
    problem: Problem, prefill: Parallelism, decode: Parallelism
) -> tuple[list[Item], list[Dropped]]:
    options = quick(fixed=(prefill, decode))
    laboratory = Laboratory(problem, options)
    limits = Limits(problem, laboratory.shapes, laboratory.sample)
    return field.disaggregated(problem, options, limits)


def test_counts_that_no_node_has_room_for_are_dropped_with_low_affinity() -> None:
    items, dropped = fixed_field(small_problem(2, 4, affinity=Affinity.LOW), ONE, ONE)
    assert all(item.candidate.num_devices <= 4 for item in items)
    assert {one.candidate.num_devices for one in dropped} == {5, 6, 7, 8}
    assert "devices do not fit a node of 4" in dropped[0].reason


def test_stages_of_both_phases_are_shared_out_among_nodes_instead_where_they_can_be() -> None:
    deep = Parallelism(2, 2)
    items, _ = fixed_field(small_problem(2, 4, affinity=Affinity.LOW), deep, deep)
    assert [item.candidate for item in items] == [pair(deep, deep, inter_op=2)]


@pytest.mark.parametrize("affinity", list(Affinity))
def test_answers_of_one_token_need_no_decode(affinity: Affinity) -> None:
    """Nobody decodes: that phase bounds no rate."""
    problem = small_problem(1, 3, affinity=affinity, workload="synthetic:300..700,1")
    found = search(problem, quick(with_baselines=True))
    assert found.recommended.best.per_device.value > 0


def test_a_device_does_not_answer_for_shapes_that_a_profile_does_not_know(tmp_path: Path) -> None:
    tables = (written(tmp_path, profile_table()),)
    known = Knowledge("smollm2-135m", device="a100-sxm4-80gb", tables=tables)
    problem = replace(small_problem(), known=known)
    refused, allowed = (KnownShapes(problem, Options(allows_roofline=x)) for x in (False, True))
    unknown = Group(Role.PREFILL, 1, Parallelism(3))
    assert allowed.instance(unknown).latency.source is Source.ROOFLINE
    with pytest.raises(ProfileError, match="nothing is known"):
        refused.instance(unknown)
