"""The candidates of a problem: those that a search starts from, and those refused at once."""

from collections.abc import Iterable, Iterator

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.model_catalog import model_shape
from planner.placement.candidates import (
    colocated,
    counted,
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
        items, dropped = _sorted(_all_counts(problem, options), limits, problem.cluster)
        return [Item(candidate) for candidate in items], dropped
    shape, cluster, degree = model_shape(problem.known.model), problem.cluster, problem.max_degree
    if problem.affinity is Affinity.LOW:
        items, dropped = _sorted(low_pairs(shape, cluster, degree), limits, cluster)
        return [Item(candidate) for candidate in items], dropped
    items, dropped = _sorted(high_pairs(shape, cluster, degree), limits, cluster)
    return [Item(candidate, is_flexible=True) for candidate in items], _by_shape(dropped, limits)


def mixed(
    problem: Problem, limits: Limits, chunk_tokens: int | None
) -> tuple[list[Item], list[Dropped]]:
    """Colocated instances of every shape."""
    shape, cluster = model_shape(problem.known.model), problem.cluster
    found = colocated(shape, cluster, chunk_tokens, problem.max_degree)
    items, dropped = _sorted(found, limits, cluster)
    return [Item(candidate) for candidate in items], dropped


def _all_counts(problem: Problem, options: Options) -> Iterator[Candidate]:
    assert options.fixed is not None, "asked for with fixed shapes alone"
    prefill, decode = options.fixed
    for each in options.fixed:
        refusal = model_shape(problem.known.model).refusal(each)
        if refusal is not None:
            raise PlannerError(f"tp {each.tp}, pp {each.pp}: {refusal}")
    for counts in mixed_counts(prefill, decode, problem.cluster.num_devices):
        yield counted(prefill, decode, counts)


def _sorted(
    candidates: Iterable[Candidate], limits: Limits, cluster: Cluster
) -> tuple[list[Candidate], list[Dropped]]:
    left, dropped = list[Candidate](), list[Dropped]()
    for candidate in candidates:
        reason = next(filter(None, map(limits.refusal, candidate.groups)), None)
        if reason is None and not max_copies(candidate, cluster):
            reason = _no_room(candidate, cluster)
        if reason is None:
            left.append(candidate)
        else:
            dropped.append(Dropped(candidate, reason))
    return left, dropped


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
