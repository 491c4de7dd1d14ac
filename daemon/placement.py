"""Which instances this daemon runs: counted out by its configuration, or read from a file.

Counts give every instance the devices after those of the one before: prefill first, then decode,
then mixed. A file is the planner's (`distserve plan --out`); its nodes have names, and one of them
is this machine; an instance's home is the node of its first stage. What cannot be run is refused
in one sentence before any process is started.
"""

import re
import socket
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from ipc.placement_file import PlacementError, crossings, read_placement
from ipc.vocabulary import InstanceSpec, Parallelism, Placement, Role, Segment

LOCAL_NODE = "local"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it is a label, a log's word, a part of addresses


def placement_of(config: DaemonConfig) -> Placement:
    """What to run.

    Raises:
        ConfigError: the file cannot be used, is for another model or not for this node alone.
    """
    if config.placement is None:
        return counted_out(config)
    placement = _read(Path(config.placement))
    _check_names(config.placement, placement)
    _check_model(config, placement)
    _check_handovers(config.placement, placement)
    _check_nodes(config, placement)
    return placement


def counted_out(config: DaemonConfig) -> Placement:
    """The instances that the configuration counts, each on devices of its own."""
    devices = count()
    node = config.node or LOCAL_NODE
    specs = tuple(
        InstanceSpec(
            name=name,
            role=role,
            parallelism=shape,
            segments=tuple(
                Segment(node, tuple(next(devices) for _ in range(shape.tp)))
                for _ in range(shape.pp)
            ),
            chunk_tokens=config.chunk_tokens if role is Role.MIXED else None,
        )
        for name, role, shape in _counted(config)
    )
    return Placement(version=1, instances=specs)


def own_node(config: DaemonConfig, placement: Placement) -> str:
    """This node's name in the placement: as configured, the only one there, or the host's."""
    nodes = nodes_of(placement.instances)
    return config.node or (nodes[0] if len(nodes) == 1 else socket.gethostname())


def nodes_of(specs: Iterable[InstanceSpec]) -> list[str]:
    """All that host a segment, in the placement's order."""
    return list(dict.fromkeys(segment.node for spec in specs for segment in spec.segments))


def guests_of(placement: Placement, node: str) -> list[str]:
    """Homes of instances that have a segment on a node which is not their home."""
    shared = [spec for spec in placement.instances if node in nodes_of([spec])]
    return list(dict.fromkeys(spec.home for spec in shared if spec.home != node))


def hosts_of(placement: Placement, node: str) -> list[str]:
    """Other nodes that host segments of instances whose home is `node`."""
    homed = [spec for spec in placement.instances if spec.home == node]
    return [name for name in nodes_of(homed) if name != node]


def devices_in_use(placement: Placement, node: str) -> list[int]:
    """Of a node, in order; a worker's share of the cores is its device's place herein."""
    segments = [segment for spec in placement.instances for segment in spec.segments]
    return sorted({d for segment in segments if segment.node == node for d in segment.devices})


def _counted(config: DaemonConfig) -> Iterator[tuple[str, Role, Parallelism]]:
    shapes = {
        Role.PREFILL: (config.prefill, Parallelism(config.prefill_tp, config.prefill_pp)),
        Role.DECODE: (config.decode, Parallelism(config.decode_tp, config.decode_pp)),
        Role.MIXED: (config.mixed, Parallelism(config.mixed_tp, config.mixed_pp)),
    }
    for role, (num_instances, shape) in shapes.items():
        for number in range(num_instances):
            yield f"{role.value}-{number}", role, shape


def _read(path: Path) -> Placement:
    try:
        return read_placement(path).placement
    except PlacementError as error:
        raise ConfigError(str(error)) from error


def _check_names(file: str, placement: Placement) -> None:
    for spec in placement.instances:
        if not _NAME.fullmatch(spec.name):
            raise ConfigError(
                f"{file}: an instance is called {spec.name[:100]!r}; names are up to 64 letters, "
                "digits, dots, dashes and underscores"
            )


def _check_model(config: DaemonConfig, placement: Placement) -> None:
    """A file may name its model by a directory or by a name that says nothing to us."""
    planned = Path(placement.model or "")
    if not (planned / "config.json").exists() or planned.resolve() == config.model_dir.resolve():
        return
    raise ConfigError(
        f"{config.placement} is for the model {planned}, but {config.model} is to be served"
    )


def _check_handovers(file: str, placement: Placement) -> None:
    for crossing in crossings(placement.instances):
        raise ConfigError(f"{file} is not servable yet: {crossing}")


def _check_nodes(config: DaemonConfig, placement: Placement) -> None:
    """This node is in it, and nodes that share an instance can reach each other."""
    ours, file = own_node(config, placement), config.placement
    if ours not in (nodes := nodes_of(placement.instances)):
        raise ConfigError(f"{file} puts nothing on this node, {ours}, but on {', '.join(nodes)}")
    others = [*hosts_of(placement, ours), *guests_of(placement, ours)]
    if not others:
        return
    shared = f"{file} puts instances on {ours} and on {others[0]}"
    for node in (ours, *others):
        if node not in config.nodes:
            raise ConfigError(f"{shared}, and there is no address in [nodes.{node}]")
    if config.link_keys is None:
        raise ConfigError(f"{shared}: nodes are joined with link_keys only (`distserve keygen`)")
