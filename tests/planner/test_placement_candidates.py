"""The candidates: as many as the reference counts, and none that a cluster has no room for."""

import pytest

from ipc.vocabulary import Parallelism
from planner.cluster import Cluster
from planner.errors import ClusterError
from planner.model_catalog import model_shape
from planner.placement.candidates import (
    colocated,
    counted,
    crosses_nodes,
    high_pairs,
    low_pairs,
    max_copies,
    mixed_counts,
    pair,
    shapes,
)
from planner.placement.choices import System

A100 = "a100-sxm4-80gb"
# (model, nodes, devices a node): Algorithm 1's and Algorithm 2's, from the reference's rules.
COUNTS = [
    ("opt-13b", 1, 4, 9, 9),
    ("opt-13b", 1, 8, 48, 48),
    ("opt-13b", 2, 8, 208, 96),
    ("opt-13b", 4, 8, 569, 133),
    ("opt-66b", 1, 4, 11, 11),
    ("opt-66b", 1, 8, 61, 61),
    ("opt-66b", 2, 8, 229, 122),
    ("opt-66b", 4, 8, 613, 183),
    ("opt-175b", 1, 4, 13, 13),
    ("opt-175b", 1, 8, 88, 88),
    ("opt-175b", 2, 8, 376, 176),
    ("opt-175b", 4, 8, 1132, 325),
]


@pytest.mark.parametrize(("model", "num_nodes", "per_node", "high", "low"), COUNTS)
def test_the_candidates_are_as_many_as_the_references(
    model: str, num_nodes: int, per_node: int, high: int, low: int
) -> None:
    cluster, shape = Cluster(num_nodes, per_node, A100), model_shape(model)
    assert len(set(high_pairs(shape, cluster))) == high
    assert len(set(low_pairs(shape, cluster))) == low


def test_tp_divides_the_heads_and_pp_the_layers() -> None:
    degrees = {(each.tp, each.pp) for each in shapes(model_shape("opt-66b"), 8)}
    assert (3, 1) in degrees  # 72 heads
    assert not {(5, 1), (7, 1), (1, 3), (1, 5), (1, 6)} & degrees  # 64 layers
    assert (3, 1) not in {(e.tp, e.pp) for e in shapes(model_shape("opt-13b"), 8)}  # 40 heads


def test_a_largest_degree_is_kept_to() -> None:
    cluster = Cluster(1, 8, A100)
    pairs = high_pairs(model_shape("opt-66b"), cluster, max_degree=2)
    degrees = {g.parallelism for each in pairs for g in each.groups}
    assert degrees == {Parallelism(tp, pp) for tp in (1, 2) for pp in (1, 2)}


def test_both_segments_of_a_stage_fit_one_node() -> None:
    cluster = Cluster(4, 8, A100)
    for each in low_pairs(model_shape("opt-66b"), cluster):
        stages = [group.parallelism.pp / each.inter_op for group in each.groups]
        assert all(stage == int(stage) for stage in stages)
        assert each.num_devices / each.inter_op <= 8
        assert max_copies(each, cluster) >= 1


def test_segments_of_one_unit_may_share_a_node() -> None:
    unit = pair(Parallelism(2, 2), Parallelism(2, 2), inter_op=2)  # two segments of four
    assert max_copies(unit, Cluster(1, 8, A100)) == 1
    assert max_copies(unit, Cluster(3, 8, A100)) == 3
    assert max_copies(unit, Cluster(1, 4, A100)) == 0


def test_a_stage_never_leaves_its_node() -> None:
    three_by_three = pair(Parallelism(3, 2), Parallelism(3, 2))  # four stages of three
    assert max_copies(three_by_three, Cluster(2, 8, A100)) == 1
    assert max_copies(three_by_three, Cluster(2, 6, A100)) == 1
    assert max_copies(three_by_three, Cluster(3, 5, A100)) == 0


def test_copies_fill_the_cluster() -> None:
    assert max_copies(pair(Parallelism(2), Parallelism(1)), Cluster(1, 8, A100)) == 2
    assert max_copies(pair(Parallelism(2), Parallelism(1)), Cluster(2, 8, A100)) == 4


def test_only_what_no_node_has_room_for_pulls_across_nodes() -> None:
    cluster = Cluster(2, 4, A100)
    assert not crosses_nodes(pair(Parallelism(2), Parallelism(2)), cluster)
    assert crosses_nodes(pair(Parallelism(4), Parallelism(2)), cluster)
    assert not crosses_nodes(pair(Parallelism(2, 2), Parallelism(1, 2), inter_op=2), cluster)


def test_counts_run_from_one_to_eight_of_each() -> None:
    one = Parallelism()
    counts = list(mixed_counts(one, one, 100))
    assert len(counts) == 64
    assert (8, 3) in counts
    assert set(mixed_counts(Parallelism(2), one, 5)) == {(1, 1), (1, 2), (1, 3), (2, 1)}


def test_a_unit_counts_all_its_devices() -> None:
    unit = counted(Parallelism(2, 1), Parallelism(2, 2), (3, 2))
    assert unit.num_devices == 14


def test_colocated_candidates_are_single_mixed_instances() -> None:
    cluster = Cluster(1, 4, A100)
    whole = colocated(model_shape("opt-13b"), cluster, None)
    chunks = colocated(model_shape("opt-13b"), cluster, 512)
    assert {each.system for each in whole} == {System.PREFILL_FIRST}
    assert {each.system for each in chunks} == {System.CHUNKED}
    assert {each.groups[0].chunk_tokens for each in chunks} == {512}
    assert len(whole) == len(chunks) == len(shapes(model_shape("opt-13b"), 4))


@pytest.mark.parametrize(("num_nodes", "per_node"), [(0, 8), (1, 0)])
def test_a_cluster_of_nothing_is_refused(num_nodes: int, per_node: int) -> None:
    with pytest.raises(ClusterError, match="at least one"):
        Cluster(num_nodes, per_node, A100)
