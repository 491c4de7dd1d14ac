"""A chosen placement as a file, and a placement in use read back: the planner's side of it.

What the file holds and how it is checked is `ipc.placement_file`'s; here its contents come from a
search, and its errors become the planner's.
"""

import importlib.metadata
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from ipc.placement_file import (
    FileLoad,
    FileNode,
    FileOrigin,
    FileRange,
    PlacementError,
    PlacementFile,
    file_of,
    read_placement,
    write_placement,
)
from ipc.sharding import layer_cut
from ipc.vocabulary import InstanceSpec, Role
from planner.deployment import Group
from planner.errors import PlannerError
from planner.intervals import Interval
from planner.model_catalog import model_shape
from planner.placement.assign import assign, node_names
from planner.placement.choices import Candidate, Chosen, Problem, System
from planner.placement.known_shapes import KnownShapes
from planner.workload.burstiness import gap_cv

NUM_SAMPLED = 4_000  # requests, for the mean lengths and the burstiness of the load


class PlacementFileError(PlannerError):
    """A placement file that cannot be read or written."""


def chosen_file(
    problem: Problem, chosen: Chosen, shapes: KnownShapes, made: str, names: Sequence[str] = ()
) -> PlacementFile:
    """The placement with its devices and where it comes from.

    Args:
        shapes: of the problem; they know each instance's L_m.
        made: the date, in ISO form; whoever plans looks at the clock.
        names: of the cluster's nodes; none for node-0, node-1, ...

    Raises:
        AssignmentError: it does not fit the cluster's nodes.
    """
    cluster = problem.cluster
    specs = assign(chosen.best.candidate, chosen.num_copies, cluster, problem.affinity, names)
    nodes = [FileNode(name, cluster.devices_per_node) for name in node_names(cluster, names)]
    packed = [_with_prefill_tokens(shapes, spec) for spec in specs]
    origin, cut = _origin(problem, chosen, made), layer_cut(model_shape(problem.known.model).sizes)
    return file_of(problem.known.model, nodes, packed, origin, cut)


def units_of(file: PlacementFile) -> tuple[Candidate, int]:
    """The candidate that a placement is copies of, and how many.

    Raises:
        PlacementFileError: its units differ, so that it is no copies of anything.
    """
    units = Counter(tuple(_groups(unit)) for unit in _by_unit(file.placement.instances))
    if len(units) > 1:
        raise PlacementFileError(
            f"the placement's units are of {len(units)} kinds; the planner looks at copies of one"
        )
    (groups, num_copies), *_ = units.items()
    inter_op = file.origin.inter_op if file.origin else 1
    return Candidate(_system(groups), groups, inter_op), num_copies


def save(path: Path, file: PlacementFile) -> None:
    """PlacementFileError where it cannot be written."""
    try:
        write_placement(path, file)
    except PlacementError as error:
        raise PlacementFileError(str(error)) from error


def load(path: Path) -> PlacementFile:
    """The placement in use; PlacementFileError names file and field."""
    try:
        return read_placement(path)
    except PlacementError as error:
        raise PlacementFileError(str(error)) from error


def _origin(problem: Problem, chosen: Chosen, made: str) -> FileOrigin:
    slo = problem.slo
    return FileOrigin(
        made=made,
        planner=importlib.metadata.version("distserved"),
        seed=problem.seed,
        load=_load(problem),
        objective=str(problem.objective),
        affinity=str(problem.affinity),
        inter_op=chosen.best.candidate.inter_op,
        device=problem.cluster.device,
        ttft_s=slo.ttft_s,
        tpot_s=slo.tpot_s,
        attainment=slo.attainment,
        goodput=_range(chosen.rate),
        goodput_per_device=_range(chosen.best.per_device),
    )


def _load(problem: Problem) -> FileLoad:
    requests = problem.workload.requests(NUM_SAMPLED, 1.0, problem.seed)
    spreads = requests.arrival_s[-1] > requests.arrival_s[0]
    return FileLoad(
        workload=problem.workload.name,
        rate=problem.rate,
        mean_input_tokens=float(requests.input_tokens.mean()),
        mean_output_tokens=float(requests.output_tokens.mean()),
        gap_cv=gap_cv(requests.arrival_s) if spreads else None,
    )


def _with_prefill_tokens(shapes: KnownShapes, spec: InstanceSpec) -> InstanceSpec:
    """L_m belongs to a shape: each instance packs its prompts up to its own."""
    if not spec.role.prefills:
        return spec
    one = shapes.instance(Group(spec.role, 1, spec.parallelism, spec.chunk_tokens))
    return msgspec.structs.replace(spec, prefill_tokens=one.limits.prefill_tokens)


def _by_unit(specs: Sequence[InstanceSpec]) -> Iterator[list[InstanceSpec]]:
    ordered = sorted(specs, key=lambda spec: spec.unit)
    for _, unit in groupby(ordered, key=lambda spec: spec.unit):
        yield list(unit)


def _groups(unit: Sequence[InstanceSpec]) -> list[Group]:
    """Equal instances counted, prefill before decode before mixed."""
    counts = Counter((spec.role, spec.parallelism, spec.chunk_tokens) for spec in unit)
    order = list(Role)
    kinds = sorted(counts, key=lambda kind: (order.index(kind[0]), kind[1].tp, kind[1].pp))
    return [Group(role, counts[role, shape, chunk], shape, chunk) for role, shape, chunk in kinds]


def _system(groups: Sequence[Group]) -> System:
    if any(group.role is not Role.MIXED for group in groups):
        return System.DISAGGREGATED
    chunked = any(group.chunk_tokens is not None for group in groups)
    return System.CHUNKED if chunked else System.PREFILL_FIRST


def _range(found: Interval) -> FileRange:
    return FileRange(found.value, found.low, found.high if math.isfinite(found.high) else None)
