"""The candidates of a problem: those that a search starts from, and those refused at once."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd

from ipc.vocabulary import Parallelism
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.model_catalog import model_shape
from planner.placement.candidates import (
    colocated,
    counted,
    crosses_nodes,
    high_pairs,
    low_pairs,
    max_copies,
    mixed_counts,
)
from planner.placement.choices import Affinity, Candidate, Dropped, Problem, System
from planner.placement.hunt import Item
from planner.placement.limits import Limits
from planner.placement.options import Options


def disaggregated(
    problem: Problem, options: Options, limits: Limits
) -> tuple[list[Item], list[Dropped]]:
    """Pairs of shapes by the problem's affinity, or all counts of the shapes that are given.

    In Algorithm 1 a refused shape is told once, not with every partner.
    """
    if options.fixed is not None:
        items, dropped = _sorted(_all_counts(problem, options.fixed), problem, limits)
        return [Item(candidate) for candidate in items], dropped
    shape, cluster, degree = model_shape(problem.known.model), problem.cluster, problem.max_degree
    if problem.affinity is Affinity.LOW:
        items, dropped = _sorted(low_pairs(shape, cluster, degree), problem, limits)
        return [Item(candidate) for candidate in items], dropped
    items, dropped = _sorted(high_pairs(shape, cluster, degree), problem, limits)
    return [Item(candidate, is_flexible=True) for candidate in items], _by_shape(dropped, limits)


def mixed(
    problem: Problem, limits: Limits, chunk_tokens: int | None
) -> tuple[list[Item], list[Dropped]]:
    """Colocated instances of every shape."""
    shape, cluster = model_shape(problem.known.model), problem.cluster
    found = colocated(shape, cluster, chunk_tokens, problem.max_degree)
    items, dropped = _sorted(found, problem, limits)
    return [Item(candidate) for candidate in items], dropped


def _all_counts(problem: Problem, fixed: tuple[Parallelism, Parallelism]) -> Iterator[Candidate]:
    prefill, decode = fixed
    for each in fixed:
        refusal = model_shape(problem.known.model).refusal(each)
        if refusal is not None:
            raise PlannerError(f"tp {each.tp}, pp {each.pp}: {refusal}")
    for counts in mixed_counts(prefill, decode, problem.cluster.num_devices):
        candidate = counted(prefill, decode, counts)
        yield _cut(candidate, problem.cluster) if problem.affinity is Affinity.LOW else candidate


def _cut(candidate: Candidate, cluster: Cluster) -> Candidate:
    """Into the fewest segments that each fit a node, where the stages can be shared out so."""
    depth = gcd(*(group.parallelism.pp for group in candidate.groups))
    for num_segments in range(1, depth + 1):
        per_segment = candidate.num_devices // num_segments
        if depth % num_segments == 0 and per_segment <= cluster.devices_per_node:
            return replace(candidate, inter_op=num_segments)
    return candidate


def _sorted(
    candidates: Iterable[Candidate], problem: Problem, limits: Limits
) -> tuple[list[Candidate], list[Dropped]]:
    left, dropped = list[Candidate](), list[Dropped]()
    for candidate in candidates:
        reason = _why_not(candidate, problem, limits)
        if reason is None:
            left.append(candidate)
        else:
            dropped.append(Dropped(candidate, reason))
    return left, dropped


def _why_not(candidate: Candidate, problem: Problem, limits: Limits) -> str | None:
    cluster = problem.cluster
    reason = next(filter(None, map(limits.refusal, candidate.groups)), None)
    if reason is not None:
        return reason
    if problem.affinity is Affinity.LOW and crosses_nodes(candidate, cluster):
        return (
            f"its {candidate.num_devices} devices do not fit a node of "
            f"{cluster.devices_per_node}, which its keys and values must not leave"
        )
    return None if max_copies(candidate, cluster) else _no_room(candidate, cluster)


def _no_room(candidate: Candidate, cluster: Cluster) -> str:
    sizes = " + ".join(
        f"{group.count * group.parallelism.pp} x {group.parallelism.tp}"
        for group in candidate.groups
    )
    return (
        f"its stages of {sizes} devices do not pack into {cluster.num_nodes} nodes of "
        f"{cluster.devices_per_node}, each stage on one node"
    )


def _by_shape(dropped: list[Dropped], limits: Limits) -> list[Dropped]:
    """A refused group once; whole pairs where neither group is to blame alone."""
    told: dict[Candidate, Dropped] = {}
    for one in dropped:
        group = next(filter(limits.refusal, one.candidate.groups), None)
        to_blame = Candidate(System.DISAGGREGATED, (group,)) if group else one.candidate
        told.setdefault(to_blame, Dropped(to_blame, one.reason))
    return list(told.values())
