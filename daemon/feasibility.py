"""Whether a placement can run on this machine: refused with the numbers before it is tried.

Shapes follow from the model's sizes. Memory is refused where the machine could never have it;
what others hold of it at the moment is each worker's own concern. On a CPU a device is a share of
the cores, so too few of them are slow and not impossible.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from daemon.model_sizes import ModelOutline
from daemon.placement import devices_in_use
from ipc.sharding import refusal, stage_layers
from ipc.vocabulary import InstanceSpec, Placement

logger = logging.getLogger(__name__)


def check_placement(config: DaemonConfig, placement: Placement, outline: ModelOutline) -> None:
    """Raises ConfigError: a shape or the memory that all of it needs cannot be."""
    for spec in placement.instances:
        if (reason := refusal(outline.sizes, spec.parallelism)) is not None:
            raise ConfigError(f"{spec.name} cannot run: {reason}")
    check_memory(config, placement, outline, num_bytes=usable_memory())
    num_cores, num_workers = len(os.sched_getaffinity(0)), len(devices_in_use(placement))
    if num_workers > num_cores:
        logger.warning("%d workers share %d cores: expect slow steps", num_workers, num_cores)


def check_memory(
    config: DaemonConfig, placement: Placement, outline: ModelOutline, *, num_bytes: int
) -> None:
    """Raises ConfigError: pools and weights alone pass `num_bytes`."""
    weights = len(placement.instances) * outline.num_weights * config.dtype.num_bytes
    pools = sum(_pool_bytes(config, spec, outline) for spec in placement.instances)
    if pools + weights > num_bytes:
        raise ConfigError(
            f"the placement needs {_gib(pools + weights)} of memory ({_gib(pools)} of KV pools, "
            f"{_gib(weights)} of weights), this machine has {_gib(num_bytes)}"
        )


def usable_memory() -> int:
    """The machine's, or what its control group leaves of it."""
    return min([psutil.virtual_memory().total, *_group_limits()])


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
