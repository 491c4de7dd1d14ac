"""A chosen candidate onto the cluster's nodes: which device each stage's ranks get.

Pure. What must be together is a *bundle*: in Algorithm 2 the same pipeline segment of a unit's
prefill and decode (paper section 4.2), so that keys and values stay on their node; elsewhere one
stage at least, whose tensor-parallel ranks talk in every layer. Beyond what must be, whole units
are kept on a node where there is room, and then whole instances.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product

from ipc.vocabulary import InstanceSpec, Role, Segment
from planner.cluster import Cluster
from planner.deployment import Group
from planner.errors import PlannerError
from planner.placement.choices import Affinity, Candidate, System


class AssignmentError(PlannerError):
    """A placement that does not fit the cluster's nodes."""


@dataclass(frozen=True)
class _Stage:
    """One stage of one instance, `tp` devices: what is never divided."""

    unit: int
    instance: int  # within its unit
    stage: int
    tp: int


Bundle = tuple[_Stage, ...]


def node_names(cluster: Cluster, given: Sequence[str] = ()) -> tuple[str, ...]:
    """As given, or node-0, node-1, ...

    Raises:
        AssignmentError: so many names are not so many nodes, or one is there twice.
    """
    if not given:
        return tuple(f"node-{index}" for index in range(cluster.num_nodes))
    if len(given) != cluster.num_nodes:
        raise AssignmentError(
            f"the cluster has {cluster.num_nodes} nodes, but {len(given)} names were given: "
            f"{', '.join(given)}"
        )
    twice = [name for name, times in Counter(given).items() if times > 1]
    if twice or not all(given):
        raise AssignmentError(f"each node needs a name of its own, not {', '.join(given)!r}")
    return tuple(given)


def assign(
    candidate: Candidate,
    num_copies: int,
    cluster: Cluster,
    affinity: Affinity,
    names: Sequence[str] = (),
) -> tuple[InstanceSpec, ...]:
    """The instances of so many copies, unit by unit, each stage with its node and devices.

    Raises:
        AssignmentError: they do not fit; says how much was needed.
    """
    nodes = node_names(cluster, names)
    needed = num_copies * candidate.num_devices
    if needed > cluster.num_devices:
        raise AssignmentError(
            f"{_told(candidate, num_copies)} needs {needed} devices, and the cluster has "
            f"{cluster.num_devices}"
        )
    is_tied = affinity is Affinity.LOW and candidate.system is System.DISAGGREGATED
    bundles = list(_bundles(candidate, num_copies, is_tied))
    homes = None if is_tied else _close(bundles, cluster)
    homes = homes or _packed(bundles, cluster)
    if homes is None:
        raise AssignmentError(_no_room(candidate, num_copies, bundles, cluster))
    return tuple(_specs(candidate, num_copies, _devices(homes, nodes)))


def _bundles(candidate: Candidate, num_copies: int, is_tied: bool) -> Iterator[Bundle]:
    """All of them, unit by unit; tied ones hold a segment of every instance of the unit."""
    for unit in range(num_copies):
        stages = [
            _Stage(unit, index, stage, group.parallelism.tp)
            for index, group in enumerate(_instances(candidate))
            for stage in range(group.parallelism.pp)
        ]
        if not is_tied:
            yield from ((stage,) for stage in stages)
            continue
        depths = [group.parallelism.pp for group in _instances(candidate)]
        for segment in range(candidate.inter_op):
            share = [stage for stage in stages if _segment(stage, depths, candidate) == segment]
            yield tuple(share)


def _segment(stage: _Stage, depths: list[int], candidate: Candidate) -> int:
    """Which of the unit's segments a stage is in: each has as many stages of an instance."""
    return stage.stage * candidate.inter_op // depths[stage.instance]


def _close(bundles: list[Bundle], cluster: Cluster) -> list[tuple[Bundle, int]] | None:
    """Unit by unit, each whole on the fullest node that has room, else by instance, else by stage.

    None where that leaves somebody out; another order may still place all.
    """
    frees = [cluster.devices_per_node] * cluster.num_nodes
    homes: list[tuple[Bundle, int]] = []
    for _, of_unit in groupby(bundles, key=lambda bundle: bundle[0].unit):
        unit = list(of_unit)
        parts = [
            list(part) for _, part in groupby(unit, key=lambda bundle: bundle[0].instance)
        ]  # by instance
        for tier in ([unit], parts, [[bundle] for bundle in unit]):
            placed = _fitted([sum(map(_size, part)) for part in tier], frees)
            if placed is not None:
                break
        else:
            return None
        for part, node in zip(tier, placed, strict=True):
            frees[node] -= sum(map(_size, part))
            homes += [(bundle, node) for bundle in part]
    return homes


def _fitted(sizes: list[int], frees: list[int]) -> list[int] | None:
    """A node for each, the largest first, each time the fullest that has room; None if one has
    none. `frees` stays as it is."""
    left = list(frees)
    nodes = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = [node for node, free in enumerate(left) if free >= sizes[item]]
        if not fitting:
            return None
        nodes[item] = min(fitting, key=lambda node: left[node])
        left[nodes[item]] -= sizes[item]
    return nodes


def _packed(bundles: list[Bundle], cluster: Cluster) -> list[tuple[Bundle, int]] | None:
    """By size alone: best fit first, and where that fails every way of filling nodes."""
    sizes = [_size(bundle) for bundle in bundles]
    frees = [cluster.devices_per_node] * cluster.num_nodes
    nodes = _fitted(sizes, frees) or _exactly(sizes, cluster)
    return None if nodes is None else list(zip(bundles, nodes, strict=True))


def _exactly(sizes: list[int], cluster: Cluster) -> list[int] | None:
    """A node for each, if there is any way at all: a node is filled so or so, then the next."""
    kinds = sorted(set(sizes), reverse=True)
    fillings = _fillings(tuple(kinds), cluster.devices_per_node)

    @cache
    def filled(left: tuple[int, ...], num_nodes: int) -> tuple[tuple[int, ...], ...] | None:
        if not any(left):
            return ()
        if num_nodes == 0:
            return None
        for filling in fillings:
            taken = tuple(map(min, filling, left))
            rest = filled(tuple(a - b for a, b in zip(left, taken, strict=True)), num_nodes - 1)
            if rest is not None:
                return (taken, *rest)
        return None

    plan = filled(tuple(sizes.count(kind) for kind in kinds), cluster.num_nodes)
    if plan is None:
        return None
    seats = {
        kind: [node for node, taken in enumerate(plan) for _ in range(taken[index])]
        for index, kind in enumerate(kinds)
    }
    return [seats[size].pop(0) for size in sizes]


def _fillings(kinds: tuple[int, ...], room: int) -> list[tuple[int, ...]]:
    """How many of each kind go on a node together, where no further one does."""
    every = [
        counts
        for counts in product(*(range(room // kind + 1) for kind in kinds))
        if sum(map(int.__mul__, counts, kinds)) <= room
    ]
    used = {counts: sum(map(int.__mul__, counts, kinds)) for counts in every}
    return sorted(
        (counts for counts in every if used[counts] + min(kinds) > room),
        key=lambda counts: -used[counts],
    )


def _devices(
    homes: list[tuple[Bundle, int]], names: Sequence[str]
) -> dict[tuple[int, int, int], Segment]:
    """Devices are counted through on each node, unit by unit."""
    used = [0] * len(names)
    found = {}
    for bundle, node in homes:
        for stage in bundle:
            devices = tuple(range(used[node], used[node] + stage.tp))
            used[node] += stage.tp
            found[stage.unit, stage.instance, stage.stage] = Segment(names[node], devices)
    return found


def _specs(
    candidate: Candidate, num_copies: int, segments: dict[tuple[int, int, int], Segment]
) -> Iterator[InstanceSpec]:
    """In the order of units; names count through each role."""
    numbers: Counter[Role] = Counter()
    for unit, (index, group) in product(range(num_copies), enumerate(_instances(candidate))):
        stages = range(group.parallelism.pp)
        yield InstanceSpec(
            name=f"{group.role}-{numbers[group.role]}",
            role=group.role,
            parallelism=group.parallelism,
            segments=tuple(segments[unit, index, stage] for stage in stages),
            unit=unit,
            chunk_tokens=group.chunk_tokens,
        )
        numbers[group.role] += 1


def _instances(candidate: Candidate) -> list[Group]:
    """The group of each instance of a unit."""
    return [group for group in candidate.groups for _ in range(group.count)]


def _size(bundle: Bundle) -> int:
    return sum(stage.tp for stage in bundle)


def _no_room(candidate: Candidate, num_copies: int, bundles: list[Bundle], cluster: Cluster) -> str:
    most = max(map(_size, bundles))
    told = _told(candidate, num_copies)
    if most > cluster.devices_per_node:
        return f"{told} needs {most} devices on one node, and a node has {cluster.devices_per_node}"
    return (
        f"{told} does not fit {cluster.num_nodes} nodes of {cluster.devices_per_node} devices: "
        f"its parts of up to {most} devices must each stay on one node, and some are left over"
    )


def _told(candidate: Candidate, num_copies: int) -> str:
    groups = ", ".join(
        f"{group.count} {group.role} (tp {group.parallelism.tp}, pp {group.parallelism.pp})"
        for group in candidate.groups
    )
    copies = "one copy" if num_copies == 1 else f"{num_copies} copies"
    return f"{copies} of {groups}"
