"""What a switch costs: what is loaded, drained and lost, and what is nearly free."""

import pytest

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group
from planner.memory import MemoryRules, weight_bytes
from planner.model_catalog import model_shape
from planner.placement.choices import Candidate, System
from planner.replan.rules import ReplanError, SwitchRates
from planner.replan.switching import Fleet, Meanwhile, SwitchCost, change, switch_cost

SHAPE = model_shape("opt-13b")
MEMORY = MemoryRules()
RATES = SwitchRates(load_bytes_per_s=1e9, start_s=10.0, role_s=1.0)
ONE, TWO = Parallelism(), Parallelism(tp=2)


def fleet(num_prefill: int, num_decode: int, *, of: Parallelism = ONE, copies: int = 1) -> Fleet:
    groups = (Group(Role.PREFILL, num_prefill, of), Group(Role.DECODE, num_decode, of))
    return Fleet(Candidate(System.DISAGGREGATED, groups), copies)


def cost(old: Fleet, new: Fleet, *, free: int = 0, rate: float = 8.0) -> SwitchCost:
    meanwhile = Meanwhile(
        rate=rate, goodput=10.0, drain_s=50.0, miss_weight=10.0, free_devices=free
    )
    return switch_cost(old, change(old, new, SHAPE, MEMORY), meanwhile, RATES)


def test_the_same_placement_costs_nothing() -> None:
    assert cost(fleet(1, 2), fleet(1, 2)).requests == 0


def test_copies_or_counts_are_the_same_instances() -> None:
    assert cost(fleet(1, 1, copies=3), fleet(3, 3)).requests == 0


def test_a_change_of_role_reloads_nothing_and_is_nearly_free() -> None:
    changed = cost(fleet(3, 1), fleet(1, 3))
    assert changed.change.num_role_changes == 2
    assert not changed.reloads
    assert changed.load_s == changed.drain_s == changed.lost_requests == 0
    assert changed.requests == pytest.approx(2 * 1.0 * 10.0 / 4)
    assert changed.requests < 0.01 * cost(fleet(3, 1), fleet(1, 1, of=TWO)).requests


def test_a_copy_more_is_loaded_while_the_others_serve() -> None:
    added = cost(fleet(1, 1), fleet(1, 1, copies=2), free=2)
    load_s = 10.0 + weight_bytes(SHAPE, ONE, MEMORY) / 1e9
    assert added.load_s == pytest.approx(load_s)
    assert (added.change.kept, added.change.loaded, added.change.leaving) == (2, 2, 0)
    assert added.idle_device_s == pytest.approx(2 * load_s)
    assert added.requests == pytest.approx(2 * load_s * 10.0 / 2)
    assert added.lost_requests == 0


def test_a_copy_less_drains_for_as_long_as_its_longest_request() -> None:
    less = cost(fleet(1, 1, copies=2), fleet(1, 1))
    assert (less.load_s, less.drain_s) == (0.0, 50.0)
    assert less.idle_device_s == 2 * 50.0
    assert not less.reloads


def test_without_free_devices_another_shape_takes_them_from_what_serves() -> None:
    old, new = fleet(2, 2), fleet(1, 1, of=TWO)
    beside, instead = cost(old, new, free=4), cost(old, new, free=0)
    assert beside.lost_requests == 0
    assert instead.taken == 4
    assert instead.lost_requests == pytest.approx(8.0 * (instead.drain_s + instead.load_s))
    half = cost(old, new, free=2)
    assert half.lost_requests == pytest.approx(3.0 * (half.drain_s + half.load_s))


def test_a_larger_tp_loads_less_into_each_device() -> None:
    small, large = (
        change(fleet(1, 1), fleet(1, 1, of=p), SHAPE, MEMORY) for p in (TWO, Parallelism(4))
    )
    assert large.longest_load_bytes < small.longest_load_bytes


def test_a_fleet_without_copies_is_refused() -> None:
    with pytest.raises(ReplanError, match="at least one copy, not 0"):
        fleet(1, 1, copies=0)
