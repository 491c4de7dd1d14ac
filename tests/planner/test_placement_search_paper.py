"""The search at the paper's size: its placements found or beaten, its impossibilities seen."""

from functools import cache

import pytest

from ipc.vocabulary import Parallelism
from planner.cluster import Cluster
from planner.deployment import Settings
from planner.latency.choose import Knowledge
from planner.placement.candidates import pair
from planner.placement.choices import Affinity, PlacementError, Problem
from planner.placement.options import Options
from planner.placement.results import Found
from planner.placement.search import evaluate, search
from planner.slo import Slo
from planner.verdict import Effort
from planner.workload.catalogue import parse_workload
from planner.workload.lengths import LengthRules

QUICK = Options(
    first=Effort(500, 500),
    final=Effort(1_000, 1_000),
    num_processes=1,
    with_baselines=False,
    with_sensitivity=False,
)
# Paper table 3, ShareGPT: prefill and decode (tp, pp); table 1's targets; as many nodes.
TABLE_3 = [
    ("opt-13b", Slo(0.25, 0.1), 4, Parallelism(2, 1), Parallelism(1, 1)),
    ("opt-66b", Slo(2.5, 0.15), 8, Parallelism(4, 1), Parallelism(2, 2)),
]


def paper_problem(model: str, slo: Slo, cluster: tuple[int, int], affinity: Affinity) -> Problem:
    """By the published coefficients; OPT-175B has none, and is a roofline's."""
    profile = None if model == "opt-175b" else "distserve-raw"
    return Problem(
        known=Knowledge(model, profile=profile),
        cluster=Cluster(*cluster, "a100-sxm4-80gb"),
        workload=parse_workload("sharegpt", rules=LengthRules(max_total_tokens=2048)),
        slo=slo,
        affinity=affinity,
        settings=Settings(max_batch=1024),
    )


@cache
def searched(model: str, slo: Slo, per_node: int, affinity: Affinity) -> Found:
    return search(paper_problem(model, slo, (1, per_node), affinity), QUICK)


@pytest.mark.parametrize(("model", "slo", "per_node", "prefill", "decode"), TABLE_3)
def test_the_papers_placement_is_found_or_beaten(
    model: str, slo: Slo, per_node: int, prefill: Parallelism, decode: Parallelism
) -> None:
    found = searched(model, slo, per_node, Affinity.LOW)
    problem = paper_problem(model, slo, (1, per_node), Affinity.LOW)
    (theirs,) = evaluate(problem, [pair(prefill, decode)], QUICK)
    assert found.recommended.best.per_device.high >= theirs.per_device.value


def test_algorithm_1_is_at_least_as_good_as_algorithm_2() -> None:
    model, slo, per_node, *_ = TABLE_3[0]
    high, low = (searched(model, slo, per_node, affinity) for affinity in Affinity)
    assert high.recommended.best.per_device.high >= low.recommended.best.per_device.value


def test_shapes_without_coefficients_are_dropped_and_told() -> None:
    model, slo, per_node, *_ = TABLE_3[1]
    reasons = [one.reason for one in searched(model, slo, per_node, Affinity.LOW).dropped]
    assert any("no tp 1 for opt-66b" in reason for reason in reasons)
    assert any("no tp 6 for opt-66b" in reason for reason in reasons)


def test_opt_175b_does_not_fit_a_node_of_eight_twice() -> None:
    """640 GB of memory, 700 GB of weights (paper section 4.2)."""
    problem = paper_problem("opt-175b", Slo(4.0, 0.2), (1, 8), Affinity.LOW)
    with pytest.raises(PlacementError, match="opt-175b fits nowhere on 1 node of 8") as caught:
        search(problem, QUICK)
    assert "GiB" in str(caught.value)


def test_opt_175b_needs_segments_on_several_nodes() -> None:
    problem = paper_problem("opt-175b", Slo(4.0, 0.2), (3, 8), Affinity.LOW)
    found = search(problem, QUICK)
    assert all(each.candidate.inter_op >= 2 for each in found.evaluated)
    assert all("GiB" in one.reason for one in found.dropped if one.candidate.inter_op == 1)
