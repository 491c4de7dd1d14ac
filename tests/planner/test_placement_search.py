"""The search on small clusters: what it finds, what it says, and what it refuses."""

import math
from dataclasses import replace
from functools import cache

import orjson
import pytest

from ipc.vocabulary import Parallelism, Role
from planner.errors import ClusterError, TargetError
from planner.model_catalog import model_shape
from planner.placement.candidates import low_pairs, max_copies, pair
from planner.placement.choices import Affinity, Objective, PlacementError, System
from planner.placement.results import Found
from planner.placement.search import evaluate, search, search_both
from planner.plan.report import as_text
from planner.slo import Slo
from tests.planner.small_clusters import quick, small_problem


@cache
def whole_search() -> Found:
    """With everything there is to say of it."""
    return search(small_problem(1, 3), quick(with_baselines=True, with_sensitivity=True))


LONG_ANSWERS = "synthetic:100..300,40..120"
CLUSTERS = [
    (1, 2, "synthetic:300..700,10..30"),
    (1, 3, LONG_ANSWERS),
    (1, 4, "synthetic:300..700,10..30"),
    (2, 2, LONG_ANSWERS),
    (2, 3, "synthetic:500~0.6,30~0.6"),
]


@pytest.mark.parametrize("affinity", list(Affinity))
@pytest.mark.parametrize(("num_nodes", "per_node", "workload"), CLUSTERS)
def test_the_pruned_search_finds_what_the_exhaustive_one_finds(
    affinity: Affinity, num_nodes: int, per_node: int, workload: str
) -> None:
    problem = small_problem(num_nodes, per_node, affinity=affinity, workload=workload)
    pruned, exhaustive = (search(problem, quick(prunes=prunes)) for prunes in (True, False))
    assert pruned.best == exhaustive.best
    assert pruned.recommended.best.per_device == exhaustive.recommended.best.per_device
    assert len(pruned.evaluated) <= len(exhaustive.evaluated)


def test_every_candidate_is_evaluated_or_dropped_with_a_reason() -> None:
    found = search(small_problem(2, 3, affinity=Affinity.LOW), quick())
    told = [each.candidate for each in found.evaluated]
    told += [one.candidate for one in found.dropped]
    pairs = low_pairs(model_shape("opt-1.3b"), small_problem(2, 3).cluster, max_degree=2)
    assert sorted(map(str, told)) == sorted(map(str, pairs))
    assert all(any(digit.isdigit() for digit in one.reason) for one in found.dropped)


def test_high_affinity_is_at_least_as_good_as_low_affinity() -> None:
    high, low = search_both(small_problem(2, 3), quick())
    assert high.recommended.best.per_device.high >= low.recommended.best.per_device.value


def test_what_two_processes_find_is_what_one_finds() -> None:
    problem = small_problem(1, 3)
    one, two = (search(problem, quick(num_processes=n)) for n in (1, 2))
    assert one.evaluated == two.evaluated
    assert (one.recommended, one.num_simulations) == (two.recommended, two.num_simulations)


def test_progress_is_told() -> None:
    heard: list[tuple[str, int, int]] = []
    found = search(small_problem(1, 2), quick(), lambda *step: heard.append(step))
    assert heard
    assert all(0 < num_done <= num_all for _, num_done, num_all in heard)
    assert found.num_simulations >= len(heard)


def test_a_rate_is_carried_by_the_fewest_instances_that_do() -> None:
    problem = small_problem(2, 4, rate=30.0, objective=Objective.DEVICES)
    found = search(problem, quick())
    best = found.recommended
    assert best.num_devices <= 8
    assert best.rate.high >= 30.0
    alone = {phase.group: phase.goodput.rate.value for phase in found.phases}
    for group in found.best.groups:
        assert group.count <= math.ceil(30.0 / alone[replace(group, count=1)]) + 1


def test_low_affinity_carries_a_rate_with_copies_of_its_unit() -> None:
    found = search(small_problem(4, 4, affinity=Affinity.LOW, rate=40.0), quick())
    best = found.recommended
    assert best.num_copies == math.ceil(40.0 / best.best.goodput.rate.value)
    assert best.num_copies <= max_copies(found.best, small_problem(4, 4).cluster)
    assert best.rate.value >= 40.0


def test_counts_of_given_shapes_are_searched() -> None:
    one = Parallelism()
    found = search(small_problem(1, 4), quick(fixed=(one, one), prunes=False))
    counts = {tuple(g.count for g in each.candidate.groups) for each in found.evaluated}
    assert counts == {(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)}


def test_throughput_needs_no_slo_and_is_more_than_goodput() -> None:
    goodput = search(small_problem(1, 3), quick())
    plain = search(small_problem(1, 3, objective=Objective.THROUGHPUT), quick())
    assert plain.recommended.best.per_device.value > goodput.recommended.best.per_device.value


def test_a_colocated_service_is_recommended_where_it_wins_and_the_reason_is_told() -> None:
    """No latency targets to speak of: two phases on two devices only wait for each other."""
    problem = small_problem(1, 2, objective=Objective.THROUGHPUT, workload=LONG_ANSWERS)
    found = search(problem, quick(with_baselines=True))
    assert found.best.system is not System.DISAGGREGATED
    assert found.disaggregated is not None
    assert "per device" in found.reasons[0]
    assert any("latency targets" in reason for reason in found.reasons)
    assert any("2 devices" in reason for reason in found.reasons)


def test_one_device_is_served_colocated() -> None:
    found = search(small_problem(1, 1, slo=Slo(1.0, 0.2)), quick(with_baselines=True))
    assert found.best.groups[0].role is Role.MIXED
    assert found.disaggregated is None


def test_gains_over_the_baselines_have_intervals() -> None:
    found = whole_search()
    assert found.best.system is System.DISAGGREGATED
    assert len(found.baselines) == 3
    for baseline in found.baselines:
        assert baseline.gain is not None
        assert baseline.attainment_gain is not None
        assert baseline.gain.low < baseline.gain.value < baseline.gain.high
        assert baseline.gain.value > 1
        assert baseline.attainment_gain.value > 0


def test_sensitivity_goes_the_way_it_must() -> None:
    found = whole_search()
    told = {each.change: each for each in found.sensitivity}
    shares = {change: each.attainment.value for change, each in told.items() if each.attainment}
    assert shares["rate -20 %"] > 0.9 > shares["rate +20 %"]
    assert shares["lengths -10 %"] > shares["lengths +10 %"]
    assert shares["arrival CV x 2"] < 0.9
    bursty = told["arrival CV x 2"].per_device
    assert bursty is not None
    assert bursty.value < found.recommended.best.per_device.value


def test_costs_follow_from_the_price_and_the_rate() -> None:
    found = search(small_problem(1, 2, price=2.0), quick())
    assert found.cost is not None
    assert found.cost.per_hour == 4.0
    hourly_requests = 3600 * found.recommended.rate.value
    assert found.cost.per_thousand_requests == pytest.approx(4000 / hourly_requests)
    assert found.cost.per_million_output_tokens > found.cost.per_million_tokens


def test_the_result_is_json() -> None:
    found = whole_search()
    body = orjson.loads(as_text(found))
    assert body["recommended"]["best"]["candidate"]["groups"]
    assert len(body["evaluated"]) == len(found.evaluated)
    assert body["asked"]["seed"] == 0


def test_a_named_candidate_is_evaluated_as_the_search_would() -> None:
    one = pair(Parallelism(), Parallelism())
    (alone,) = evaluate(small_problem(1, 2), [one], quick())
    found = search(small_problem(1, 2), quick())
    assert alone.per_device.value == pytest.approx(found.recommended.best.per_device.value, rel=0.1)


def test_a_model_that_fits_nowhere_is_one_sentence() -> None:
    with pytest.raises(PlacementError, match="fits nowhere on 1 node of 2") as caught:
        search(small_problem(1, 2, kv_tokens=160), quick(with_baselines=True))
    assert "holds 160 tokens" in str(caught.value)


def test_targets_that_nothing_meets_are_one_sentence() -> None:
    with pytest.raises(PlacementError, match=r"TTFT .* at best .* the target is 20 ms"):
        search(small_problem(1, 2, slo=Slo(0.02, 0.035)), quick())


@pytest.mark.parametrize("affinity", list(Affinity))
def test_a_rate_out_of_reach_is_one_sentence(affinity: Affinity) -> None:
    with pytest.raises(PlacementError, match="carries 500 requests/s: the best found carries"):
        search(small_problem(1, 3, rate=500.0, affinity=affinity), quick())


def test_too_few_devices_for_both_phases_are_one_sentence() -> None:
    with pytest.raises(PlacementError, match="a node has too few devices"):
        search(small_problem(2, 1, affinity=Affinity.LOW), quick())


def test_a_cluster_of_no_devices_is_one_sentence() -> None:
    with pytest.raises(ClusterError, match="at least one device"):
        small_problem(1, 0)


def test_no_processes_are_refused() -> None:
    with pytest.raises(TargetError, match="at least one process"):
        quick(num_processes=0)
