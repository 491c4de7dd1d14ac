"""A candidate onto nodes: no device twice, what belongs together together, and all that can fit."""

import random
from collections import Counter

import pytest

from ipc.placement_file import crossings
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment
from planner.cluster import Cluster
from planner.deployment import Group
from planner.placement.assign import AssignmentError, assign, node_names
from planner.placement.choices import Affinity, Candidate, System


def cluster(num_nodes: int, devices_per_node: int = 8) -> Cluster:
    return Cluster(num_nodes, devices_per_node, "a100")


def pair(
    prefill: tuple[int, int], decode: tuple[int, int], inter_op: int = 1, counts: str = "1:1"
) -> Candidate:
    """Shapes as (tp, pp)."""
    num_prefill, num_decode = map(int, counts.split(":"))
    groups = (
        Group(Role.PREFILL, num_prefill, Parallelism(*prefill)),
        Group(Role.DECODE, num_decode, Parallelism(*decode)),
    )
    return Candidate(System.DISAGGREGATED, groups, inter_op)


def mixed(tp: int, pp: int, chunk_tokens: int | None = None) -> Candidate:
    group = Group(Role.MIXED, 1, Parallelism(tp, pp), chunk_tokens)
    return Candidate(System.CHUNKED if chunk_tokens else System.PREFILL_FIRST, (group,))


def test_the_papers_opt_175b_has_each_segment_of_both_phases_on_one_node() -> None:
    """Table 3: prefill tp 3, pp 3 and decode tp 4, pp 3; three segments of seven devices."""
    specs = assign(pair((3, 3), (4, 3), inter_op=3), 1, cluster(4), Affinity.LOW)
    prefill, decode = specs
    assert [s.node for s in prefill.segments] == [s.node for s in decode.segments]
    assert len({s.node for s in prefill.segments}) == 3
    assert prefill.segments[0] == Segment("node-0", (0, 1, 2))
    assert decode.segments[0] == Segment("node-0", (3, 4, 5, 6))


def test_the_papers_opt_66b_fills_a_node() -> None:
    """Table 3: prefill tp 4 and decode tp 2, pp 2 in one segment."""
    specs = assign(pair((4, 1), (2, 2)), 2, cluster(2), Affinity.LOW)
    assert [spec.name for spec in specs] == ["prefill-0", "decode-0", "prefill-1", "decode-1"]
    assert [spec.unit for spec in specs] == [0, 0, 1, 1]
    assert [{s.node for s in spec.segments} for spec in specs] == [
        {"node-0"}, {"node-0"}, {"node-1"}, {"node-1"}
    ]  # fmt: skip
    assert specs[1].segments == (Segment("node-0", (4, 5)), Segment("node-0", (6, 7)))


def test_nodes_bear_the_names_they_were_given() -> None:
    specs = assign(mixed(8, 2, 512), 1, cluster(2), Affinity.LOW, ("left", "right"))
    assert [s.node for s in specs[0].segments] == ["left", "right"]
    assert specs[0].name == "mixed-0"
    assert specs[0].chunk_tokens == 512


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "")])
def test_wrong_names_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(AssignmentError):
        node_names(cluster(2), names)


def test_with_high_affinity_a_unit_still_stays_on_one_node_where_there_is_room() -> None:
    specs = assign(pair((2, 1), (1, 1)), 4, cluster(2), Affinity.HIGH)
    assert crossings(specs) == []


def test_with_high_affinity_a_unit_is_spread_where_it_must_be() -> None:
    """Two nodes of three and units of two: the third unit takes what is left of both."""
    specs = assign(pair((1, 1), (1, 1)), 3, cluster(2, 3), Affinity.HIGH)
    check(specs, cluster(2, 3))
    assert len(crossings(specs)) == 1


def test_with_low_affinity_it_is_not() -> None:
    with pytest.raises(AssignmentError, match="its parts of up to 2 devices must each stay"):
        assign(pair((1, 1), (1, 1)), 3, cluster(2, 3), Affinity.LOW)


def test_more_devices_than_there_are_are_told_in_numbers() -> None:
    with pytest.raises(AssignmentError) as caught:
        assign(pair((4, 1), (4, 1)), 3, cluster(2), Affinity.LOW)
    assert str(caught.value) == (
        "3 copies of 1 prefill (tp 4, pp 1), 1 decode (tp 4, pp 1) needs 24 devices, "
        "and the cluster has 16"
    )


def test_a_segment_larger_than_a_node_is_told_in_numbers() -> None:
    with pytest.raises(AssignmentError, match="needs 6 devices on one node, and a node has 4"):
        assign(pair((4, 2), (2, 2), inter_op=2), 1, cluster(4, 4), Affinity.LOW)


def test_counts_that_no_node_has_room_for_are_spread_with_high_affinity_alone() -> None:
    candidate = pair((2, 1), (2, 1), counts="3:2")
    specs = assign(candidate, 1, cluster(3, 4), Affinity.HIGH)
    check(specs, cluster(3, 4))
    assert crossings(specs)
    with pytest.raises(AssignmentError, match="needs 10 devices on one node, and a node has 4"):
        assign(candidate, 1, cluster(3, 4), Affinity.LOW)


def test_parts_that_fill_nodes_exactly_fit_although_largest_first_does_not() -> None:
    """Largest first puts 4 + 3 on one node of 8 and 3 + 2 + 2 on the other: the last 2 is left."""
    groups = tuple(
        Group(role, count, Parallelism(tp))
        for role, count, tp in ((Role.PREFILL, 1, 4), (Role.DECODE, 2, 3), (Role.MIXED, 3, 2))
    )
    candidate = Candidate(System.DISAGGREGATED, groups)
    check(assign(candidate, 1, cluster(2), Affinity.HIGH), cluster(2))


def test_random_candidates_get_every_device_once_and_each_segment_one_node() -> None:
    rng = random.Random(5)
    placed = 0
    for _ in range(400):
        where = cluster(rng.randint(1, 5), rng.choice((2, 4, 8)))
        inter_op = rng.choice((1, 1, 2, 3))
        shapes = [(rng.choice((1, 1, 2, 3)), inter_op * rng.choice((1, 1, 2))) for _ in range(2)]
        counts = f"{rng.randint(1, 3)}:{rng.randint(1, 2)}"
        affinity = rng.choice(list(Affinity))
        candidate = pair(shapes[0], shapes[1], inter_op, counts)
        try:
            specs = assign(candidate, rng.randint(1, 3), where, affinity)
        except AssignmentError:
            continue
        placed += 1
        check(specs, where)
        if affinity is Affinity.LOW:
            assert crossings(specs) == []
    assert placed > 50


def test_random_units_of_one_segment_fill_as_many_nodes_as_can_be() -> None:
    """With equal bundles the number that fits is known: what fits a node, times the nodes."""
    rng = random.Random(7)
    for _ in range(60):
        where = cluster(rng.randint(1, 6), rng.choice((4, 8)))
        half = where.devices_per_node // 2
        candidate = pair((rng.randint(1, half), 1), (rng.randint(1, half), 1))
        most = where.devices_per_node // candidate.num_devices * where.num_nodes
        assert len(assign(candidate, most, where, Affinity.LOW)) == 2 * most
        with pytest.raises(AssignmentError):
            assign(candidate, most + 1, where, Affinity.LOW)


def check(specs: tuple[InstanceSpec, ...], where: Cluster) -> None:
    """No device twice, none that is not there, tp devices a stage, pp stages an instance."""
    used: Counter[tuple[str, int]] = Counter()
    for spec in specs:
        assert len(spec.segments) == spec.parallelism.pp
        for segment in spec.segments:
            assert len(segment.devices) == spec.parallelism.tp
            used.update((segment.node, device) for device in segment.devices)
    assert set(used.values()) == {1}
    assert max(device for _, device in used) < where.devices_per_node
    assert {node for node, _ in used} <= set(node_names(where))
