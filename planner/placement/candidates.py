"""Which candidates there are, before anybody asks how fast they are: cuts, pairs, counts.

The rules are the reference's (search_configs.py of the DistServe repository), so that its counts
come out: tp divides the heads, pp the layers. Algorithm 1 pairs any two shapes that the cluster
has devices for. Algorithm 2 cuts both instances into `inter_op` segments; the same segment of
prefill and decode shares a node (paper section 4.2). What fits into memory is not asked here.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from ipc.vocabulary import Parallelism, Role
from planner.cluster import Cluster
from planner.deployment import Group
from planner.model_shape import ModelShape
from planner.placement.choices import Candidate, System

MAX_COUNT = 8  # instances of one phase in a unit: the counts that the reference looks at


def shapes(model: ModelShape, max_devices: int, max_degree: int | None = None) -> list[Parallelism]:
    """Every (tp, pp) that the model can be cut into evenly, with so many devices at most."""
    most = min(max_devices, max_degree or max_devices)
    found = (Parallelism(tp, pp) for tp, pp in product(range(1, most + 1), repeat=2))
    return [each for each in found if each.num_workers <= max_devices and _is_even(model, each)]


def high_pairs(
    model: ModelShape, cluster: Cluster, max_degree: int | None = None
) -> list[Candidate]:
    """Algorithm 1's: one prefill and one decode instance anywhere in the cluster."""
    each = shapes(model, cluster.num_devices - 1, max_degree)
    return [
        pair(prefill, decode)
        for prefill, decode in product(each, repeat=2)
        if prefill.num_workers + decode.num_workers <= cluster.num_devices
    ]


def low_pairs(
    model: ModelShape, cluster: Cluster, max_degree: int | None = None
) -> list[Candidate]:
    """Algorithm 2's: segments of both instances, each pair of them on one node."""
    return [
        pair(_whole(prefill, inter_op), _whole(decode, inter_op), inter_op)
        for inter_op in range(1, cluster.num_nodes + 1)
        if model.num_layers % inter_op == 0
        for prefill, decode in _segments(model, cluster, inter_op, max_degree)
    ]


def colocated(
    model: ModelShape, cluster: Cluster, chunk_tokens: int | None, max_degree: int | None = None
) -> list[Candidate]:
    """One mixed instance of every shape; prompts run whole and first without `chunk_tokens`."""
    system = System.PREFILL_FIRST if chunk_tokens is None else System.CHUNKED
    return [
        Candidate(system, (Group(Role.MIXED, 1, each, chunk_tokens),))
        for each in shapes(model, cluster.num_devices, max_degree)
    ]


def pair(prefill: Parallelism, decode: Parallelism, inter_op: int = 1) -> Candidate:
    """One instance of each."""
    return counted(prefill, decode, (1, 1), inter_op)


def counted(
    prefill: Parallelism, decode: Parallelism, counts: tuple[int, int], inter_op: int = 1
) -> Candidate:
    """So many prefill and decode instances."""
    groups = (Group(Role.PREFILL, counts[0], prefill), Group(Role.DECODE, counts[1], decode))
    return Candidate(System.DISAGGREGATED, groups, inter_op)


def mixed_counts(
    prefill: Parallelism, decode: Parallelism, max_devices: int, most: int = MAX_COUNT
) -> Iterator[tuple[int, int]]:
    """All n : m of these shapes that there are devices for, 1 to `most` of each."""
    for n, m in product(range(1, most + 1), repeat=2):
        if n * prefill.num_workers + m * decode.num_workers <= max_devices:
            yield n, m


def max_copies(candidate: Candidate, cluster: Cluster) -> int:
    """How many copies the cluster has room for, a stage always within a node; 0 for none.

    In Algorithm 2 the room is counted in segments, prefill's and decode's together.
    """
    if candidate.inter_op > 1 or _is_one_node(candidate, cluster):
        per_segment = candidate.num_devices // candidate.inter_op
        segments = cluster.num_nodes * (cluster.devices_per_node // per_segment)
        return segments // candidate.inter_op
    copies = cluster.num_devices // candidate.num_devices
    stages = list(_stage_sizes(candidate))
    while copies and not _packs(stages * copies, cluster):
        copies -= 1
    return copies


def crosses_nodes(candidate: Candidate, cluster: Cluster) -> bool:
    """Whether some pulls must leave a node: no node has room for both phases, and they are not
    cut into segments that share one."""
    is_alone = candidate.system is not System.DISAGGREGATED
    return not (is_alone or candidate.inter_op > 1 or _is_one_node(candidate, cluster))


def _is_even(model: ModelShape, parallelism: Parallelism) -> bool:
    return model.num_layers % parallelism.pp == 0 and model.refusal(parallelism) is None


def _is_one_node(candidate: Candidate, cluster: Cluster) -> bool:
    return candidate.num_devices <= cluster.devices_per_node


def _segments(
    model: ModelShape, cluster: Cluster, inter_op: int, max_degree: int | None
) -> Iterator[tuple[Parallelism, Parallelism]]:
    """Pairs of one segment each that fit a node together."""
    inside = [
        each
        for each in shapes(model, cluster.devices_per_node - 1, max_degree)
        if model.num_layers % (inter_op * each.pp) == 0
    ]
    for prefill, decode in product(inside, repeat=2):
        if prefill.num_workers + decode.num_workers <= cluster.devices_per_node:
            yield prefill, decode


def _whole(segment: Parallelism, inter_op: int) -> Parallelism:
    return Parallelism(segment.tp, segment.pp * inter_op)


def _stage_sizes(candidate: Candidate) -> Iterable[int]:
    for group in candidate.groups:
        yield from [group.parallelism.tp] * (group.parallelism.pp * group.count)


def _packs(stages: list[int], cluster: Cluster) -> bool:
    """First fit, the largest stages first."""
    free = [cluster.devices_per_node] * cluster.num_nodes
    for size in sorted(stages, reverse=True):
        node = next((i for i, room in enumerate(free) if room >= size), None)
        if node is None:
            return False
        free[node] -= size
    return True
