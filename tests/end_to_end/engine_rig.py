"""A rig whose engine is the real one: real weights, real kernels, pools that are really pulled."""

import os
from collections.abc import Callable
from pathlib import Path

from gpu_workers.cpu_exchange import CpuExchange, Parts, copy_parts
from gpu_workers.engine import EngineSpec, build_executor, pool_layout
from gpu_workers.models.config import read_config
from ipc.kv_layout import RankLayout
from ipc.vocabulary import DType, Role, WorkerName
from tests.gpu_workers.rig import BLOCK_SIZE, Rig

MAX_CONTEXT = 512


class EngineRig(Rig):
    """One instance of a model directory, in fp32."""

    def __init__(
        self,
        role: Role,
        model: Path,
        *,
        name: str,
        epoch: int,
        copy: Callable[[Parts], None] = copy_parts,
        **limits: int,
    ) -> None:
        config = read_config(model)
        num_blocks = limits.get("num_blocks", 256)
        kv_bytes = num_blocks * BLOCK_SIZE * config.kv_bytes_per_token(DType.FP32)
        layout = pool_layout(config, dtype=DType.FP32, block_size=BLOCK_SIZE, kv_bytes=kv_bytes)
        spec = EngineSpec(model_dir=str(model), dtype=DType.FP32, max_context_tokens=MAX_CONTEXT)
        self.cpu_exchange = CpuExchange(layout, name, copy=copy)
        executor = build_executor(config, spec, self.cpu_exchange)
        super().__init__(
            role,
            name=name,
            epoch=epoch,
            engine=(executor, self.cpu_exchange),
            **{"num_blocks": num_blocks, "max_tokens": 64} | limits,
        )

    @property
    def layout(self) -> RankLayout:
        return self.cpu_exchange.layout

    def connect(self, other: Rig) -> None:
        assert isinstance(other, EngineRig)
        theirs = other.cpu_exchange
        descriptor = os.dup(theirs.descriptor)
        self.cpu_exchange.map_peer(WorkerName(other.name), other.epoch, theirs.layout, descriptor)

    @property
    def num_sequences(self) -> int:
        return self.executor.num_sequences

    def close(self) -> None:
        os.close(self.cpu_exchange.descriptor)
