"""A chosen placement as a file, and a placement in use read back: the planner's side of it.

What the file holds and how it is checked is `ipc.placement_file`'s; here its contents come from a
search, and its errors become the planner's.
"""

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ipc.placement_file import (
    FileNode,
    FileOrigin,
    FileRange,
    PlacementError,
    PlacementFile,
    file_of,
    read_placement,
    write_placement,
)
from ipc.vocabulary import InstanceSpec
from planner.deployment import saturation_tokens
from planner.errors import PlannerError
from planner.intervals import Interval
from planner.latency.choose import latency_model
from planner.placement.assign import assign, node_names
from planner.placement.choices import Chosen, Problem


class PlacementFileError(PlannerError):
    """A placement file that cannot be read or written."""


def chosen_file(
    problem: Problem, chosen: Chosen, made: str, names: Sequence[str] = ()
) -> PlacementFile:
    """The placement with its devices and where it comes from.

    Args:
        made: the date, in ISO form; whoever plans looks at the clock.
        names: of the cluster's nodes; none for node-0, node-1, ...

    Raises:
        AssignmentError: it does not fit the cluster's nodes.
    """
    cluster = problem.cluster
    specs = assign(chosen.best.candidate, chosen.num_copies, cluster, problem.affinity, names)
    nodes = [FileNode(name, cluster.devices_per_node) for name in node_names(cluster, names)]
    packed = [_with_prefill_tokens(problem, spec) for spec in specs]
    return file_of(problem.known.model, nodes, packed, _origin(problem, chosen, made))


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
        workload=problem.workload.name,
        seed=problem.seed,
        objective=str(problem.objective),
        affinity=str(problem.affinity),
        device=problem.cluster.device,
        ttft_s=slo.ttft_s,
        tpot_s=slo.tpot_s,
        attainment=slo.attainment,
        rate=problem.rate,
        goodput=_range(chosen.rate),
        goodput_per_device=_range(chosen.best.per_device),
    )


def _with_prefill_tokens(problem: Problem, spec: InstanceSpec) -> InstanceSpec:
    """L_m belongs to a shape: each instance packs its prompts up to its own."""
    if not spec.role.prefills:
        return spec
    tokens = problem.settings.prefill_tokens
    if tokens is None:
        tokens = saturation_tokens(latency_model(problem.known, spec.parallelism))
    return msgspec.structs.replace(spec, prefill_tokens=tokens)


def _range(found: Interval) -> FileRange:
    return FileRange(found.value, found.low, found.high if math.isfinite(found.high) else None)
