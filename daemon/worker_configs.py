"""What a worker is told at its start: its share of the cores, its pool, where its group meets."""

import os
from collections.abc import Sequence

import msgspec

from daemon.config import DaemonConfig
from daemon.devices import read_devices
from daemon.meeting_points import MeetingPoints
from daemon.placement import devices_in_use, own_node
from ipc.messages import MixedPolicy, WorkerConfig
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import InstanceSpec, Placement, PrefillPolicy, WorkerName


class WorkerConfigs:
    """Makes them, for one placement under one configuration."""

    def __init__(
        self,
        config: DaemonConfig,
        placement: Placement,
        *,
        endpoint: str,
        meeting_points: MeetingPoints,
        max_context_tokens: int,
        num_token_ids: int,
    ) -> None:
        self._config = config
        # Where links to it are moved to another version while we run, all workers keep this one.
        self._model_dir = str(config.model_dir.resolve())
        self._node = own_node(config, placement)
        self._named = read_devices(config.devices, config.device)
        self.adopt(placement)
        self._endpoint = endpoint
        self._meeting_points = meeting_points
        self._max_context = max_context_tokens
        self._num_token_ids = num_token_ids

    def adopt(self, placement: Placement) -> None:
        """From now on that is what runs; workers that run already keep their share of the cores."""
        self.placement = placement
        self._devices = devices_in_use(placement, self._node)

    @property
    def own_instances(self) -> list[InstanceSpec]:
        """Those whose home is this node."""
        return [spec for spec in self.placement.instances if spec.home == self._node]

    def limits_of(self, spec: InstanceSpec) -> BatchLimits:
        """Of its leader's steps. Chunks beside decodes are taken first come, first served."""
        config = self._config
        is_chunked = spec.chunk_tokens is not None
        return BatchLimits(
            spec.prefill_tokens or config.prefill_tokens,
            config.max_batch,
            PrefillPolicy.FCFS if is_chunked else config.prefill_policy,
        )

    def of(self, spec: InstanceSpec, epoch: int, name: WorkerName) -> WorkerConfig:
        """For one worker of one incarnation."""
        config = self._config
        device = spec.segments[name.stage].devices[name.tp_rank]
        is_here = spec.node_of(name) == self._node  # else its host says
        cores, num_threads = self._cpu_share(device) if is_here else ((), 1)
        own_device, visible_gpus = self._named.seen_by(device) if is_here else (device, ())
        meeting, limits = self._meeting_points.of(spec, epoch), self.limits_of(spec)
        return WorkerConfig(
            name=name,
            epoch=epoch,
            role=spec.role,
            parallelism=spec.parallelism,
            endpoint=self._endpoint,
            model_dir=self._model_dir,
            dtype=config.dtype,
            load_format=config.load_format,
            device=own_device,
            visible_gpus=visible_gpus,
            device_kind=config.device,
            gpu_memory_utilization=config.gpu_memory_utilization,
            share_gpus=config.share_gpus,
            cpu_cores=cores,
            num_threads=num_threads,
            kv_bytes=config.kv_bytes(spec.role),
            block_size=config.block_size,
            max_context_tokens=self._max_context,
            prefill_tokens=limits.prefill_tokens,
            max_batch=limits.max_batch,
            prefill_policy=limits.prefill_policy,
            mixed=MixedPolicy(chunk_tokens=spec.chunk_tokens),
            num_token_ids=self._num_token_ids,
            group_endpoint=meeting.plans,
            group_public=meeting.keys.public,
            group_secret=meeting.keys.secret if name.is_leader else "",
            rendezvous=meeting.collectives,
        )

    def settled(self, config: WorkerConfig) -> WorkerConfig:
        """Of another home's worker, with what depends on this machine."""
        cores, num_threads = self._cpu_share(config.device)
        own_device, visible_gpus = self._named.seen_by(config.device)
        return msgspec.structs.replace(
            config,
            endpoint=self._endpoint,
            model_dir=self._model_dir,
            device=own_device,
            visible_gpus=visible_gpus,
            device_kind=self._config.device,
            gpu_memory_utilization=self._config.gpu_memory_utilization,
            share_gpus=self._config.share_gpus,
            cpu_cores=cores,
            num_threads=num_threads,
        )

    def forget(self, epoch: int) -> None:
        """All workers of that epoch are gone: so is where they met."""
        self._meeting_points.remove(epoch)

    def _cpu_share(self, device: int) -> tuple[tuple[int, ...], int]:
        """(cores to be pinned to, threads) of one worker: as configured, else see `cpu_share`."""
        if self._named.cores:
            cores = self._named.cores[device]
            return cores, self._config.threads_per_worker or len(cores)
        return cpu_share(
            sorted(os.sched_getaffinity(0)),
            self._devices.index(device),
            num_workers=len(self._devices),
            num_threads=self._config.threads_per_worker,
        )


def cpu_share(
    cores: Sequence[int], index: int, *, num_workers: int, num_threads: int | None
) -> tuple[tuple[int, ...], int]:
    """(cores to be pinned to, threads): equal shares, with one core left to the daemon if any is.

    Threads that share a core spin against each other, so where cores lack nobody is pinned and
    everybody has one thread.
    """
    spare = 1 if len(cores) > num_workers else 0
    threads = num_threads or max(1, (len(cores) - spare) // num_workers)
    if threads * num_workers > len(cores):
        return (), threads
    return tuple(cores[index * threads : (index + 1) * threads]), threads
