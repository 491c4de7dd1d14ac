"""The device that is checked: what makes pools, kernels and engines on it.

A stage knows devices by this seam alone, so the whole check runs on a CPU too, where it proves its
own plumbing; tests put faulty devices here.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.engine import EngineSpec, build_executor, build_kernels, pool_layout
from gpu_workers.executor import Executor
from gpu_workers.kernels import Kernels
from gpu_workers.kv_exchange import KVExchange, OwnExchange
from gpu_workers.models.config import ModelConfig, read_config
from ipc.kv_layout import RankLayout
from ipc.messages import LoadFormat
from ipc.vocabulary import DType


class Module(NamedTuple):
    """A library for the device; `load` compiles it first where that was not done before."""

    name: str
    is_compiled: Callable[[], bool]
    load: Callable[[], None]


class Backend(Protocol):
    """One device."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def is_gpu(self) -> bool: ...

    @property
    def exporter_command(self) -> Sequence[str]:
        """Starts a process that has pools on the same device, see `exporter`."""
        ...

    @property
    def num_spare_blocks(self) -> int:
        """Blocks at a pool's end that no sequence may have."""
        ...

    def stored_head_dim(self, head_dim: int) -> int:
        """How wide such a head is in a pool."""
        ...

    def modules(self) -> Sequence[Module]:
        """What is compiled for the device, in the order in which it is worth having."""
        ...

    def is_compiled(self, dtype: DType, head_dim: int) -> bool:
        """Whether attention over such pools needs no compiler any more."""
        ...

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange: ...

    def release(self, exchange: KVExchange) -> None:
        """Give its pool back, which nobody uses any more."""
        ...

    def kernels(self, config: ModelConfig, pool: torch.Tensor, max_context: int) -> Kernels: ...

    def executor(self, spec: EngineSpec, kv_bytes: int, *, max_batch: int) -> Executor:
        """An engine for the model that the spec names, as the service would have it."""
        ...

    def eager(self, executor: Executor) -> Executor:
        """Another one over the same model and pool, which captures nothing."""
        ...

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        ...

    def synchronize(self) -> None:
        """Until all that was asked of the device is done."""
        ...

    def serve_flags(self) -> list[str]:
        """What `distserve serve` is told of the device."""
        ...


class CpuBackend:
    """The CPU, with pools in memory files."""

    name = "cpu"
    dtype = DType.BF16
    is_gpu = False
    num_spare_blocks = 0

    @property
    def exporter_command(self) -> Sequence[str]:
        return (sys.executable, "-P", "-m", "gpu_workers", "check-gpu-exporter")

    def stored_head_dim(self, head_dim: int) -> int:
        return head_dim

    def modules(self) -> Sequence[Module]:
        return ()

    def is_compiled(self, dtype: DType, head_dim: int) -> bool:
        return True

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return CpuExchange(layout, label)

    def release(self, exchange: KVExchange) -> None:
        assert isinstance(exchange, CpuExchange)
        exchange.close()

    def kernels(self, config: ModelConfig, pool: torch.Tensor, max_context: int) -> Kernels:
        return build_kernels(config, pool, max_context)

    def executor(self, spec: EngineSpec, kv_bytes: int, *, max_batch: int) -> Executor:
        config = read_config(spec.model_dir)
        layout = pool_layout(config, dtype=spec.dtype, block_size=16, kv_bytes=kv_bytes)
        return build_executor(config, spec, CpuExchange(layout, "check"))

    def eager(self, executor: Executor) -> Executor:
        return Executor(
            executor.model,
            executor.kernels,
            executor.exchange,
            max_context_tokens=executor.max_context_tokens,
            num_token_ids=executor.num_token_ids,
        )

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def synchronize(self) -> None:
        """Everything is done when its call returns."""

    def serve_flags(self) -> list[str]:
        return ["--device", "cpu"]


def spec_of(model_dir: str, dtype: DType, *, max_context: int, is_dummy: bool) -> EngineSpec:
    """How to run a model of the check's."""
    return EngineSpec(
        model_dir=model_dir,
        dtype=dtype,
        load_format=LoadFormat.DUMMY if is_dummy else LoadFormat.SAFETENSORS,
        max_context_tokens=max_context,
    )
