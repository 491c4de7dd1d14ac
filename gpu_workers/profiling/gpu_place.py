"""A rank's GPU, for `distserve profile`: what a worker there would have, and a peer to pull from.

The peer is a process of its own, since CUDA shares memory between processes only. Only loaded
where a GPU is measured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from gpu_workers.check_gpu.exporter import Exporter
from gpu_workers.collectives import Collectives
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Claim, Gpu, open_gpu, reckon_pool
from gpu_workers.cuda_exchange import exchange_on, gpu_of
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, build_executor, pool_layout
from gpu_workers.executor import Executor
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.models.config import read_config
from gpu_workers.nccl_collectives import join_gpus
from gpu_workers.profiling.bench import EPOCH, PEER
from gpu_workers.profiling.places import twin_layout
from gpu_workers.profiling.rounds import Progress
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.profiling.subject import INSTANCE, Subject
from ipc.kv_layout import RankLayout
from ipc.sharding import Shard
from ipc.vocabulary import DeviceKind, WorkerName


class GpuPlace:
    """One GPU.

    Args:
        gpu: the device, the library that computes attention on it, and the largest steps.
        device_name, uuid: of the device.
        make_exchange: how a pool is made there.
        exporter_command: starts the process that has the pool to pull from.
    """

    kind = DeviceKind.CUDA
    num_spare_blocks = 1  # which rows of padding read and write

    def __init__(
        self,
        gpu: Gpu,
        *,
        device_name: str,
        uuid: str,
        make_exchange: Callable[[RankLayout, str], OwnExchange],
        exporter_command: Sequence[str],
    ) -> None:
        self._gpu = gpu
        self._uuid = uuid
        self.device_name = device_name
        self._make_exchange = make_exchange
        self._exporter_command = exporter_command

    def stopwatch(self, *, is_alone: bool) -> Stopwatch:
        """Of whole time, from an idle device to an idle device."""
        return Stopwatch(is_alone=False, settle=self._gpu.device.synchronize)

    def layout(self, subject: Subject, shard: Shard) -> RankLayout:
        config = read_config(subject.model_dir)
        claim = Claim(kv_bytes=subject.kv_bytes, utilization=subject.gpu_memory_utilization)
        plan = reckon_pool(self._gpu, config, shard, subject.dtype, claim)
        return pool_layout(
            config,
            dtype=subject.dtype,
            block_size=subject.block_size,
            kv_bytes=plan.kv_bytes,
            shard=shard,
            head_dim=stored_head_dim(config.head_dim),
        )

    def exchange(self, layout: RankLayout) -> OwnExchange:
        return self._make_exchange(layout, INSTANCE)

    def meet(self, subject: Subject, shard: Shard, url: str) -> Collectives:
        return join_gpus(
            url,
            shard,
            hidden_size=read_config(subject.model_dir).hidden_size,
            dtype=TORCH_DTYPES[subject.dtype],
            device=self._gpu.device.torch_device,
            gpu_uuid=self._uuid,
        )

    def executor(
        self,
        spec: EngineSpec,
        exchange: OwnExchange,
        collectives: Collectives,
        progress: Progress,
    ) -> Executor:
        return build_executor(
            read_config(spec.model_dir),
            spec,
            exchange,
            collectives=collectives,
            progress=progress,
            gpu=self._gpu,
        )

    @contextmanager
    def twin(self, exchange: OwnExchange, num_tokens: int, name: WorkerName) -> Iterator[int]:
        layout = twin_layout(exchange.layout, num_tokens)
        worker = msgspec.structs.replace(name, instance=PEER)
        with Exporter(self._exporter_command) as exporter:
            (descriptor,) = exporter.make([layout])
            exporter.overwrite()  # so that its memory is there
            exchange.map_peer(worker, EPOCH, layout, descriptor)
            try:
                yield layout.num_blocks
            finally:
                exchange.unmap_instance(PEER, EPOCH)


def gpu_place(subject: Subject, number: int) -> GpuPlace:
    """The place of that rank on this machine. Raises ModelError: it is not there, or FlashInfer is
    not."""
    assert subject.first_gpu is not None
    index = subject.first_gpu + number
    peer = index if subject.pull_from is None else subject.pull_from + number
    limits = StepLimits(subject.max_context_tokens, subject.max_batch)
    gpu = open_gpu(index, subject.dtype, limits)
    device = gpu.device.torch_device
    command = (sys.executable, "-P", "-m", "gpu_workers", "check-gpu-exporter")
    return GpuPlace(
        gpu,
        device_name=torch.cuda.get_device_name(device),
        uuid=gpu_of(device).uuid,
        make_exchange=lambda layout, label: exchange_on(device, layout, label),
        exporter_command=(*command, "--device", f"cuda:{peer}"),
    )
