"""The parts of the search: one phase alone, other workloads, bounds, ties, clean endings."""

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.placement.candidates import pair
from planner.placement.choices import Candidate, Dropped, Evaluated, System
from planner.placement.crew import Crew
from planner.placement.hunt import pooled
from planner.placement.laboratory import FindGoodput, Laboratory, Part, Setup
from planner.placement.limits import Limits
from planner.placement.options import Depth
from planner.placement.outcome import nothing_fits
from planner.placement.ranking import best_of, contenders, ratio
from planner.placement.search import search
from planner.placement.variation import Variation, varied
from planner.workload.burstiness import gap_cv
from planner.workload.catalogue import parse_arrivals, parse_workload
from tests.planner.small_clusters import quick, small_problem

ONE = Parallelism()
PREFILL, DECODE = Group(Role.PREFILL, 1, ONE), Group(Role.DECODE, 1, ONE)


def goodput_of(setup: Setup) -> float:
    laboratory = Laboratory(small_problem(), quick())
    return laboratory.find(FindGoodput(setup, Depth.FINAL, 5.0, 1e3, 1_000)).rate.value


def test_each_phase_alone_carries_at_least_what_both_together_do() -> None:
    whole = goodput_of(Setup((PREFILL, DECODE)))
    prefill = goodput_of(Setup((PREFILL,), part=Part.PREFILL))
    decode = goodput_of(Setup((DECODE,), part=Part.DECODE))
    assert whole <= 1.05 * min(prefill, decode)


def test_the_analytic_cap_is_above_what_is_simulated() -> None:
    problem, options = small_problem(), quick()
    laboratory = Laboratory(problem, options)
    limits = Limits(problem, laboratory.shapes, laboratory.sample)
    for group, part in ((PREFILL, Part.PREFILL), (DECODE, Part.DECODE)):
        assert limits.cap(group) > goodput_of(Setup((group,), part=part))
        assert limits.cap(replace(group, count=3)) == pytest.approx(3 * limits.cap(group))


@pytest.mark.parametrize("count", [2, 4])
def test_several_instances_bear_more_than_as_many_alone_but_not_beyond_the_bound(
    count: int,
) -> None:
    """Where one instance must stay idle to be in time, four of them carry twice four times it."""
    problem = small_problem()
    laboratory = Laboratory(problem, quick())
    cap = Limits(problem, laboratory.shapes, laboratory.sample).cap(PREFILL)
    one = goodput_of(Setup((PREFILL,), part=Part.PREFILL))
    together = goodput_of(Setup((replace(PREFILL, count=count),), part=Part.PREFILL))
    assert count * one < together <= count * cap * pooled(one / cap, count)


def test_a_stage_wider_than_a_node_is_refused() -> None:
    problem = replace(small_problem(2, 2), max_degree=None)
    laboratory = Laboratory(problem, quick())
    limits = Limits(problem, laboratory.shapes, laboratory.sample)
    refusal = limits.refusal(Group(Role.PREFILL, 1, Parallelism(4)))
    assert refusal is not None
    assert "a node has 2 devices" in refusal


def test_longer_requests_are_longer() -> None:
    workload = parse_workload("synthetic:100..200,10..20")
    longer = varied(workload, Variation(lengths=1.5)).requests(200, 1.0)
    as_it_is = workload.requests(200, 1.0)
    assert np.allclose(longer.input_tokens, 1.5 * as_it_is.input_tokens, atol=0.5)
    assert (longer.arrival_s == as_it_is.arrival_s).all()


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:2"])
def test_twice_the_cv_at_the_same_rate(arrivals: str) -> None:
    workload = parse_workload("synthetic:100,10", parse_arrivals(arrivals))
    plain = workload.requests(50_000, 3.0)
    bursty = varied(workload, Variation(cv=2.0)).requests(50_000, 3.0)
    assert gap_cv(bursty.arrival_s) == pytest.approx(2 * gap_cv(plain.arrival_s), rel=0.1)
    assert bursty.rate == pytest.approx(plain.rate, rel=0.1)


def evaluated(num_ranks: int, value: float, half_width: float = 0.0) -> Evaluated:
    """With that goodput per device."""
    candidate = pair(Parallelism(num_ranks), ONE)
    per_device = Interval(value, value - half_width, value + half_width)
    rate = per_device.divided(1 / candidate.num_devices)
    return Evaluated(candidate, Goodput(rate, per_device, 0.9, "", True, (), 1))


def test_ties_within_the_interval_go_to_fewer_devices() -> None:
    big, small, worse = evaluated(4, 1.0, 0.1), evaluated(2, 0.95), evaluated(1, 0.8)
    assert best_of([big, small, worse]) is small
    assert best_of([evaluated(4, 1.0, 0.01), small, worse]) is not small


def test_who_is_far_behind_is_not_looked_at_again() -> None:
    near, far = evaluated(2, 0.9), evaluated(1, 0.5)
    found = [far, evaluated(4, 1.0), near, evaluated(1, 0.0)]
    assert contenders(found, small_problem())[1:] == [near]


def test_the_interval_of_a_ratio_adds_both_uncertainties() -> None:
    sure, unsure = Interval(2.0, 2.0, 2.0), Interval(1.0, 0.8, 1.25)
    assert ratio(sure, unsure).low == pytest.approx(1.6)
    assert ratio(unsure, unsure).low < 0.8
    assert ratio(unsure, unsure).value == 1.0


def test_an_interrupted_search_leaves_no_process_behind() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        search(small_problem(), quick(num_processes=2), interrupt)
    assert set(multiprocessing.active_children()) <= before


def test_what_was_simulated_once_is_not_simulated_again() -> None:
    problem, options = small_problem(1, 3), quick()
    with Crew(problem, options) as crew:
        search(problem, options, crew=crew)
        so_far = crew.num_simulations
        assert search(problem, options, crew=crew).num_simulations == 0
        assert crew.num_simulations == so_far


def test_of_refused_candidates_of_one_size_the_commonest_reason_is_told() -> None:
    """A bug: reasons were counted without the shapes that they were said of, and looked up with."""
    small, memory = "its pool holds 160 tokens", "weights take 325 GiB"
    dropped = [
        Dropped(Candidate(System.PREFILL_FIRST, (Group(Role.MIXED, 1, shape),)), reason)
        for shape, reason in (
            (Parallelism(2, 1), f"mixed at tp 2, pp 1: {small}"),
            (Parallelism(1, 2), f"mixed at tp 1, pp 2: {memory}"),
            (ONE, f"mixed at tp 1, pp 1: {memory}"),
        )
    ]
    assert "refused as mixed at tp 1, pp 2: weights" in nothing_fits(small_problem(), dropped)
