"""The placement file: what `distserve plan` writes, for people to read and for daemons to run.

JSON with a version. Beside the instances and their devices it says where the placement comes from
(load, targets, what was predicted) and whether it can be served: keys and values are handed over
within a node only, so a prefill and a decode stage with the same layers on two nodes cannot.
Pure: the planner writes and reads it, the daemon and the coordinator read it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson

from ipc.vocabulary import (
    Cut,
    InstanceSpec,
    Parallelism,
    Placement,
    Role,
    Segment,
    equal_cut,
)

VERSION = 1
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
_NUMBERS = re.compile(rb"(?<=\[)\n\s*\d+(,\n\s*\d+)*\n\s*(?=\])")  # no string holds a newline

Count = Annotated[int, msgspec.Meta(ge=1)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Index = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class PlacementError(ValueError):
    """A placement file that cannot be used; says in one sentence which field and why."""


class FileNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine, with devices 0 to `num_devices` - 1."""

    name: Name
    num_devices: Count


class FileStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slice of the layers; its tp devices are on one node."""

    stage: Index
    node: Name
    devices: tuple[Index, ...]


class FileInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One copy of the model; see `InstanceSpec`."""

    name: Name
    role: Role
    unit: Index
    tp: Degree
    pp: Degree
    stages: tuple[FileStage, ...]
    prefill_tokens: Count | None = None
    chunk_tokens: Count | None = None


class FileRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An estimate with its 95 % interval; `high` is null where nothing bounded it."""

    value: float
    low: float
    high: float | None


class FileLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a placement was planned for: a later log is held against it.

    Args:
        rate: requests per second that were asked for; null where the best unit was.
        gap_cv: coefficient of variation of the gaps between arrivals.
    """

    workload: str
    rate: float | None
    mean_input_tokens: float
    mean_output_tokens: float
    gap_cv: float | None


class FileOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a placement comes from: enough to search it again and to judge it later.

    Args:
        made: the date, as whoever planned it gave it.
        planner: the program's version.
        inter_op: pipeline segments that prefill and decode share, each on one node.
        goodput, goodput_per_device: predicted requests per second, of the whole placement.
    """

    made: str
    planner: str
    seed: int
    load: FileLoad
    objective: str
    affinity: str
    inter_op: int
    device: str
    ttft_s: float
    tpot_s: float
    attainment: float
    goodput: FileRange
    goodput_per_device: FileRange


class PlacementFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file, in the order in which it is read.

    Args:
        servable: whether every handover that the plan relies on stays within a node ...
        crossings: ... and those that do not, in words.
        origin: null in a file that was written by hand.
    """

    version: int
    model: Name
    servable: bool
    crossings: tuple[str, ...] = ()
    nodes: tuple[FileNode, ...]
    instances: tuple[FileInstance, ...]
    origin: FileOrigin | None = None

    @property
    def placement(self) -> Placement:
        """What a daemon runs."""
        specs = tuple(_spec(instance) for instance in self.instances)
        return Placement(version=self.version, instances=specs, model=self.model)


def file_of(
    model: str,
    nodes: Sequence[FileNode],
    specs: Sequence[InstanceSpec],
    origin: FileOrigin | None = None,
    cut: Cut = equal_cut,
) -> PlacementFile:
    """The file of a placement; whether it can be served follows from where its stages are. Who
    reads it without the model takes stages as equal, so it must be servable that way as well."""
    found = crossings(specs) or crossings(specs, cut)
    return PlacementFile(
        version=VERSION,
        model=model,
        servable=not found,
        crossings=tuple(found),
        nodes=tuple(nodes),
        instances=tuple(_instance(spec) for spec in specs),
        origin=origin,
    )


def crossings(specs: Sequence[InstanceSpec], cut: Cut = equal_cut) -> list[str]:
    """The handovers within a unit that would need keys and values across nodes, in words."""
    pairs = (
        (prefill, decode, prefill.first_gap(decode, cut))
        for prefill, decode in product(specs, specs)
        if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        and prefill.unit == decode.unit
    )
    return [
        f"{_located(prefill, gap[0])} and {_located(decode, gap[1])} hold the same layers and "
        "share no node"
        for prefill, decode, gap in pairs
        if gap is not None
    ]


def to_json(file: PlacementFile) -> bytes:
    """Indented, for people; the numbers of a list on one line."""
    text = orjson.dumps(msgspec.to_builtins(file), option=_INDENTED)
    return _NUMBERS.sub(lambda found: b" ".join(found[0].split()), text)


def write_placement(path: Path, file: PlacementFile) -> None:
    """PlacementError where it cannot be written."""
    try:
        path.write_bytes(to_json(file))
    except OSError as error:
        raise PlacementError(f"{path} cannot be written: {error.strerror}") from error


def read_placement(path: Path) -> PlacementFile:
    """The file, checked.

    Raises:
        PlacementError: it cannot be read, or describes no placement; names file and field.
    """
    try:
        return parse_placement(path.read_bytes())
    except OSError as error:
        raise PlacementError(f"{path} cannot be read: {error.strerror}") from error
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from error


def parse_placement(text: bytes) -> PlacementFile:
    """As `read_placement`, from the text itself."""
    try:
        raw = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise PlacementError(f"not JSON: {error}") from error
    _check_version(raw)
    try:
        file = msgspec.convert(raw, PlacementFile)
    except msgspec.ValidationError as error:
        raise PlacementError(str(error)) from error
    for trouble in _troubles(file):
        raise PlacementError(trouble)
    return file


def _check_version(raw: Any) -> None:
    """Before anything else: another version may have other fields."""
    version = raw.get("version") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise PlacementError(f"no placement file: it has no whole number `version` ({VERSION})")
    if version != VERSION:
        raise PlacementError(
            f"the placement file has version {version}, this program reads version {VERSION}"
        )


def _troubles(file: PlacementFile) -> Iterator[str]:
    """What is wrong with it, the simplest first."""
    yield from _repeated([node.name for node in file.nodes], "$.nodes", "node")
    yield from _repeated([instance.name for instance in file.instances], "$.instances", "instance")
    for index, instance in enumerate(file.instances):
        yield from _shape_troubles(instance, f"$.instances[{index}]")
    yield from _device_troubles(file)
    yield from _role_troubles(file.instances)
    found = tuple(crossings(file.placement.instances))
    if file.servable and found:
        yield f"$.servable is true, but {found[0]}"


def _repeated(names: Sequence[str], path: str, noun: str) -> Iterator[str]:
    if not names:
        yield f"{path} is empty: a placement needs at least one {noun}"
    for name, times in Counter(names).items():
        if times > 1:
            yield f"{path}: the {noun} {name} is there {times} times"


def _shape_troubles(instance: FileInstance, path: str) -> Iterator[str]:
    if len(instance.stages) != instance.pp:
        yield (
            f"{path}: {instance.name} has pp {instance.pp}, so it needs that many stages, "
            f"not {len(instance.stages)}"
        )
    for index, stage in enumerate(instance.stages):
        where = f"{path}.stages[{index}]"
        if stage.stage != index:
            yield f"{where}: stages come in order, so this is stage {index}, not {stage.stage}"
        if len(stage.devices) != instance.tp:
            yield (
                f"{where}: {instance.name} has tp {instance.tp}, so each stage needs that many "
                f"devices, not {len(stage.devices)}"
            )
    if instance.chunk_tokens is not None and instance.role is not Role.MIXED:
        yield f"{path}.chunk_tokens is for mixed instances, and {instance.name} is {instance.role}"


def _device_troubles(file: PlacementFile) -> Iterator[str]:
    sizes = {node.name: node.num_devices for node in file.nodes}
    owners: dict[tuple[str, int], str] = {}
    for where, instance, stage in _stages(file):
        if stage.node not in sizes:
            yield f"{where}.node: there is no node {stage.node!r} among {', '.join(sizes)}"
            continue
        for device in stage.devices:
            if device >= sizes[stage.node]:
                yield (
                    f"{where}.devices: {stage.node} has devices 0 to {sizes[stage.node] - 1}, "
                    f"so there is no device {device}"
                )
            owner = owners.get((stage.node, device))
            owners[stage.node, device] = where
            if owner is not None:
                yield (
                    f"{where}.devices: device {device} of {stage.node} is taken twice, here for "
                    f"{instance.name} and in {owner}"
                )


def _role_troubles(instances: Sequence[FileInstance]) -> Iterator[str]:
    """Without a counterpart in its unit, a prefill has nobody to hand to, or a decode nobody to
    pull from."""
    counterparts = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
    roles = {(instance.unit, instance.role) for instance in instances}
    for index, instance in enumerate(instances):
        other = counterparts.get(instance.role)
        if other is not None and (instance.unit, other) not in roles:
            yield (
                f"$.instances[{index}]: {instance.name} has no counterpart: unit "
                f"{instance.unit} has no {other} instance"
            )


def _stages(file: PlacementFile) -> Iterator[tuple[str, FileInstance, FileStage]]:
    for index, instance in enumerate(file.instances):
        for number, stage in enumerate(instance.stages):
            yield f"$.instances[{index}].stages[{number}]", instance, stage


def _located(spec: InstanceSpec, stage: int) -> str:
    return f"{spec.name} stage {stage} ({spec.segments[stage].node})"


def _spec(instance: FileInstance) -> InstanceSpec:
    return InstanceSpec(
        name=instance.name,
        role=instance.role,
        parallelism=Parallelism(instance.tp, instance.pp),
        segments=tuple(Segment(stage.node, stage.devices) for stage in instance.stages),
        unit=instance.unit,
        prefill_tokens=instance.prefill_tokens,
        chunk_tokens=instance.chunk_tokens,
    )


def _instance(spec: InstanceSpec) -> FileInstance:
    return FileInstance(
        name=spec.name,
        role=spec.role,
        unit=spec.unit,
        tp=spec.parallelism.tp,
        pp=spec.parallelism.pp,
        stages=tuple(
            FileStage(number, segment.node, segment.devices)
            for number, segment in enumerate(spec.segments)
        ),
        prefill_tokens=spec.prefill_tokens,
        chunk_tokens=spec.chunk_tokens,
    )
