"""Where a rank that is profiled computes: on cores of this machine, or on one of its GPUs.

A place makes what a worker of the daemon would have there, and a second pool to pull from. Those
of a machine are asked for by rank; tests have another machine.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from platform import machine
from typing import Protocol

import msgspec
import torch

from gpu_workers.collectives import Collectives
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, build_executor, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.models.config import read_config
from gpu_workers.profiling.bench import EPOCH, PEER
from gpu_workers.profiling.rounds import Progress
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.profiling.subject import INSTANCE, Subject
from gpu_workers.shm_collectives import sums_library
from ipc.kv_layout import RankLayout
from ipc.sharding import Shard
from ipc.vocabulary import DeviceKind, WorkerName


class Place(Protocol):
    """Of one rank."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def device_name(self) -> str:
        """Its maker's name for it."""
        ...

    @property
    def num_spare_blocks(self) -> int:
        """Blocks at a pool's end that no sequence may have."""
        ...

    def stopwatch(self, *, is_alone: bool) -> Stopwatch:
        """For what this thread asks to be done here."""
        ...

    def layout(self, subject: Subject, shard: Shard) -> RankLayout:
        """Of the pool that there is room for. Raises ModelError: there is none."""
        ...

    def exchange(self, layout: RankLayout) -> OwnExchange:
        """Raises PoolUnavailable."""
        ...

    def meet(self, subject: Subject, shard: Shard, url: str) -> Collectives:
        """The other ranks, of whom there are some. Raises CollectivesFailed."""
        ...

    def executor(
        self,
        spec: EngineSpec,
        exchange: OwnExchange,
        collectives: Collectives,
        progress: Progress,
    ) -> Executor:
        """Raises ModelError."""
        ...

    def twin(
        self, exchange: OwnExchange, num_tokens: int, name: WorkerName
    ) -> AbstractContextManager[int]:
        """A peer with the layers and heads of that exchange, known to it as the same rank of
        another instance, with room for so many tokens; its number of blocks."""
        ...


class Machine(Protocol):
    """What places there are."""

    @property
    def rank_command(self) -> Sequence[str]:
        """Starts another rank's process, see `ranks.main`."""
        ...

    @property
    def num_gpus(self) -> int: ...

    def place(self, subject: Subject, number: int) -> Place:
        """Of the rank of that number. Raises ModelError: it cannot be had."""
        ...


class ThisMachine:
    """The one this runs on."""

    rank_command = (sys.executable, "-P", "-m", "gpu_workers", "profile-rank")

    @property
    def num_gpus(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def place(self, subject: Subject, number: int) -> Place:
        if subject.first_gpu is None:
            return CpuPlace()
        from gpu_workers.profiling.gpu_place import gpu_place

        return gpu_place(subject, number)


class CpuPlace:
    """Cores; pools are memory files."""

    kind = DeviceKind.CPU
    num_spare_blocks = 0

    @property
    def device_name(self) -> str:
        """The processor's own, or the machine's kind where the system does not tell."""
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return machine()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else machine()

    def stopwatch(self, *, is_alone: bool) -> Stopwatch:
        return Stopwatch(is_alone=is_alone)

    def layout(self, subject: Subject, shard: Shard) -> RankLayout:
        return pool_layout(
            read_config(subject.model_dir),
            dtype=subject.dtype,
            block_size=subject.block_size,
            kv_bytes=subject.kv_bytes,
            shard=shard,
        )

    def exchange(self, layout: RankLayout) -> OwnExchange:
        return CpuExchange(layout, INSTANCE)

    def meet(self, subject: Subject, shard: Shard, url: str) -> Collectives:
        return GlooCollectives(
            url,
            shard,
            hidden_size=read_config(subject.model_dir).hidden_size,
            dtype=TORCH_DTYPES[subject.dtype],
            library=sums_library(),
        )

    def executor(
        self,
        spec: EngineSpec,
        exchange: OwnExchange,
        collectives: Collectives,
        progress: Progress,
    ) -> Executor:
        config = read_config(spec.model_dir)
        return build_executor(config, spec, exchange, collectives=collectives, progress=progress)

    @contextmanager
    def twin(self, exchange: OwnExchange, num_tokens: int, name: WorkerName) -> Iterator[int]:
        """In this process: every rank makes its own, together they are a second instance."""
        peer = CpuExchange(twin_layout(exchange.layout, num_tokens), PEER)
        worker = msgspec.structs.replace(name, instance=PEER)
        try:
            peer.pool.fill_(1.0)
            exchange.map_peer(worker, EPOCH, peer.layout, os.dup(peer.descriptor))
            yield peer.layout.num_blocks
        finally:
            exchange.unmap_instance(PEER, EPOCH)
            os.close(peer.descriptor)


def twin_layout(layout: RankLayout, num_tokens: int) -> RankLayout:
    num_blocks = min(layout.num_blocks, layout.blocks_for(num_tokens))
    return msgspec.structs.replace(layout, num_blocks=num_blocks)


def check_gpus(subject: Subject, num_gpus: int) -> None:
    """Raises ModelError: there are fewer than the instance, or the one that it pulls from, has
    workers."""
    needed = subject.parallelism.num_workers
    for first in (subject.first_gpu, subject.pull_from):
        if first is not None and first + needed > num_gpus:
            raise ModelError(
                f"tp {subject.parallelism.tp}, pp {subject.parallelism.pp} take {needed} GPU(s) "
                f"from cuda:{first} on, and CUDA sees {num_gpus} here"
            )
