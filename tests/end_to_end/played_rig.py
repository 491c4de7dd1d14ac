"""A rig on a played GPU: the whole CUDA backend in one thread, two steps under way, pulls by IPC.

The device is behind and so is its copying beside it, so that whatever is used before it is there,
or given away before it was read, changes what is drawn.
"""

import os
import random
from pathlib import Path
from typing import Any

import torch

from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu, usable
from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_routes import Gpu as Place
from gpu_workers.engine import EngineSpec, build_executor, pool_layout
from gpu_workers.models.config import read_config
from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout
from ipc.messages import Audit, Command, MixedPolicy
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import DType, Role, WorkerName
from tests.chaos.two_in_flight import TwoInFlight
from tests.end_to_end.engine_rig import MAX_CONTEXT
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda.lagging_device import LaggingDevice
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart
from tests.gpu_workers.rig import BLOCK_SIZE, Rig

DTYPE = DType.FP16
MAX_BATCH = 24
UUID = "GPU-played"


def played_layout(model: Path, num_blocks: int) -> RankLayout:
    """Of a pool with that many blocks, and one for padding."""
    config = read_config(model)
    head_dim = stored_head_dim(config.head_dim)
    token_bytes = 2 * config.num_layers * config.num_kv_heads * head_dim * DTYPE.num_bytes
    kv_bytes = (num_blocks + 1) * BLOCK_SIZE * token_bytes
    return pool_layout(
        config, dtype=DTYPE, block_size=BLOCK_SIZE, kv_bytes=kv_bytes, head_dim=head_dim
    )


class DicedCudart(FakeCudart):
    """Copies beside the steps are done at once, or when somebody looks: dice decide."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def _ask(self, stream: int, what: str, about: Any) -> None:
        super()._ask(stream, what, about)
        if what == "record" and self._dice.random() < 0.5:
            self.finish(stream)


class PlayedRig(TwoInFlight):
    """One instance of a model directory."""

    def __init__(
        self,
        role: Role,
        model: Path,
        *,
        name: str,
        epoch: int,
        seed: int = 0,
        num_blocks: int = 256,
        chunk_tokens: int | None = None,
    ) -> None:
        dice = random.Random(seed * 1_000_003 + epoch)
        self.device = LaggingDevice(seed=dice.randrange(1 << 30))
        self.library = DicedCudart(dice)
        memory = DeviceMemory(CudaRuntime(self.library))
        site = Site(memory, Place(0, (UUID,)), torch.device("cpu"), lambda: 0)
        self.cuda_exchange = CudaExchange(played_layout(model, num_blocks), name, site)
        self.device.adopt(self.cuda_exchange.pool)
        limits = StepLimits(MAX_CONTEXT, MAX_BATCH)
        gpu = Gpu(self.device, FakeFlashInfer(self.device), limits)
        spec = EngineSpec(model_dir=str(model), dtype=DTYPE, max_context_tokens=MAX_CONTEXT)
        with self.device.stream:
            executor = build_executor(read_config(model), spec, self.cuda_exchange, gpu=gpu)
        engine = (executor, self.cuda_exchange)
        super().__init__(role, name=name, epoch=epoch, engine=engine, dice=dice)
        self.scheduler = Scheduler(
            Owner(name, epoch),
            role,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(prefill_tokens=64, max_batch=MAX_BATCH),
            max_in_flight=executor.max_in_flight,
        )

    @property
    def layout(self) -> RankLayout:
        return usable(self.cuda_exchange.layout)

    def connect(self, other: Rig) -> None:
        assert isinstance(other, PlayedRig)
        theirs = other.cuda_exchange
        descriptor = os.dup(theirs.descriptor)
        name = WorkerName(other.name)
        self.cuda_exchange.map_peer(name, other.epoch, theirs.layout, descriptor)

    def tell(self, command: Command) -> None:
        if not isinstance(command, Audit):
            super().tell(command)

    def step(self) -> bool:
        with self.device.stream:
            return super().step()

    @property
    def num_sequences(self) -> int:
        return int(self.executor.num_sequences)

    def close(self) -> None:
        self.cuda_exchange.close()
        self.library.end()
