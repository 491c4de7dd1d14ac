"""Whether a placement can run on this machine: refused with the numbers before it is tried.

Shapes follow from the model's sizes. Memory is refused where the machine could never have it;
what others hold of it at the moment is each worker's own concern. On a CPU a device is a share of
the cores, so too few of them are slow and not impossible; but where devices are named, there are
no others.
"""

import logging
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psutil

from daemon.config import DaemonConfig
from daemon.devices import NVIDIA_DRIVER, read_devices
from daemon.errors import ConfigError
from daemon.model_sizes import ModelOutline
from daemon.placement import devices_in_use, own_node
from ipc.kv_layout import Span
from ipc.sharding import refusal, stage_layers
from ipc.vocabulary import DeviceKind, InstanceSpec, Placement, Role

logger = logging.getLogger(__name__)


def check_placement(config: DaemonConfig, placement: Placement, outline: ModelOutline) -> None:
    """Raises ConfigError: a shape or the memory that all of it needs cannot be."""
    for spec in placement.instances:
        if (reason := refusal(outline.sizes, spec.parallelism)) is not None:
            raise ConfigError(f"{spec.name} cannot run: {reason}")
    check_handovers(placement, outline)
    if not computes_on_gpus(config):  # else pools and weights are not in the machine's memory
        check_memory(config, placement, outline, num_bytes=usable_memory())
    devices = devices_in_use(placement, own_node(config, placement))
    named = read_devices(config.devices, config.device)
    may_share = bool(named.gpus) and config.share_gpus
    if len(named) and devices and devices[-1] >= len(named) and not may_share:
        raise ConfigError(
            f"devices: {len(named)} are named, and the placement needs number {devices[-1]} "
            "(they are counted from 0)"
        )
    num_cores, num_workers = len(os.sched_getaffinity(0)), len(devices)
    if num_workers > num_cores:
        logger.warning("%d workers share %d cores: expect slow steps", num_workers, num_cores)


def check_memory(
    config: DaemonConfig, placement: Placement, outline: ModelOutline, *, num_bytes: int
) -> None:
    """Raises ConfigError: pools and weights of this node's workers alone pass `num_bytes`."""
    node, num_layers = own_node(config, placement), outline.sizes.num_layers
    weights = pools = 0
    for spec in placement.instances:
        layers = stage_layers(outline.sizes, spec.parallelism.pp)
        own = sum(layers[i].size for i, seg in enumerate(spec.segments) if seg.node == node)
        weights += outline.num_weights * config.dtype.num_bytes * own // num_layers
        pools += _pool_bytes(config, spec, outline) * own // num_layers
    if pools + weights > num_bytes:
        raise ConfigError(
            f"the placement needs {_gib(pools + weights)} of memory ({_gib(pools)} of KV pools, "
            f"{_gib(weights)} of weights), this machine has {_gib(num_bytes)}"
        )


def check_handovers(placement: Placement, outline: ModelOutline) -> None:
    """Raises ConfigError: layers as they are really cut would be pulled across nodes.

    A placement file's own check takes stages as equal shares of the layers.
    """
    for prefill, decode in product(placement.instances, placement.instances):
        if (prefill.role, decode.role) != (Role.PREFILL, Role.DECODE):
            continue
        if prefill.first_gap(decode) is not None:  # of another unit, and never a pair
            continue
        for here, there in product(_located(prefill, outline), _located(decode, outline)):
            if here[1] != there[1] and here[0].meet(there[0]) is not None:
                raise ConfigError(
                    f"{prefill.name} and {decode.name} share layers {there[0].start} to "
                    f"{there[0].stop - 1}, but are on {here[1]} and {there[1]} there: of this "
                    "model, stages of different pipelines end at different layers"
                )


def computes_on_gpus(config: DaemonConfig) -> bool:
    """As workers will decide by themselves; here without asking CUDA."""
    is_auto = config.device is DeviceKind.AUTO
    return config.device is DeviceKind.CUDA or (is_auto and NVIDIA_DRIVER.exists())


def usable_memory() -> int:
    """The machine's, or what its control group leaves of it."""
    return min([psutil.virtual_memory().total, *_group_limits()])


def _located(spec: InstanceSpec, outline: ModelOutline) -> list[tuple[Span, str]]:
    """The layers of each stage, and its node."""
    layers = stage_layers(outline.sizes, spec.parallelism.pp)
    return [(span, segment.node) for span, segment in zip(layers, spec.segments, strict=True)]


def _pool_bytes(config: DaemonConfig, spec: InstanceSpec, outline: ModelOutline) -> int:
    """All ranks have as many blocks, and the one with the most layers has a whole pool's worth."""
    layers = [span.size for span in stage_layers(outline.sizes, spec.parallelism.pp)]
    per_layer = config.kv_bytes(spec.role) // max(layers)
    return spec.parallelism.tp * per_layer * sum(layers)


def _group_limits() -> Iterator[int]:
    """Of our control group (version 2); its parents' are not looked at."""
    try:
        (line,) = [g for g in Path("/proc/self/cgroup").read_text().splitlines() if g[:3] == "0::"]
        yield int(Path(f"/sys/fs/cgroup{line[3:]}/memory.max").read_text())
    except (OSError, ValueError):  # none, or "max"
        return


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
