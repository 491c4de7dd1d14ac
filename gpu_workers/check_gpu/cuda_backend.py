"""One GPU as the check sees it. Only loaded where one is checked."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu, open_gpu
from gpu_workers.cuda_exchange import exchange_on
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_runner import CudaRunner
from gpu_workers.engine import EngineSpec, build_executor, build_kernels, pool_layout
from gpu_workers.executor import Executor
from gpu_workers.kernels import Kernels
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.models.config import ModelConfig, read_config
from ipc.kv_layout import RankLayout
from ipc.vocabulary import DType

MAX_TOKENS = 4096


class CudaBackend:
    """A GPU, with pools that are opened by CUDA IPC.

    Args:
        gpu: the device and the library that computes attention on it.
        make_exchange: how a pool is made there.
        exporter_command: starts a process with pools on the same device.
    """

    dtype = DType.BF16
    is_gpu = True

    def __init__(
        self,
        gpu: Gpu,
        make_exchange: Callable[..., OwnExchange],
        exporter_command: Sequence[str],
    ) -> None:
        self._gpu = gpu
        self._device = gpu.device.torch_device
        self._make_exchange = make_exchange
        self.exporter_command = exporter_command
        self.name = str(self._device)

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return self._make_exchange(layout, label, **how)

    def kernels(self, config: ModelConfig, pool: torch.Tensor, max_context: int) -> Kernels:
        return build_kernels(config, pool, max_context, gpu=self._gpu)

    def executor(
        self, spec: EngineSpec, kv_bytes: int, *, is_graphed: bool, max_batch: int
    ) -> Executor:
        config = read_config(spec.model_dir)
        layout = pool_layout(
            config,
            dtype=spec.dtype,
            block_size=16,
            kv_bytes=kv_bytes,
            head_dim=stored_head_dim(config.head_dim),
        )
        gpu = dataclasses.replace(self._gpu, limits=StepLimits(MAX_TOKENS, max_batch))
        executor = build_executor(config, spec, self.exchange(layout, "check"), gpu=gpu)
        return executor if is_graphed else self._eager(executor)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, copy=True)

    def synchronize(self) -> None:
        self._gpu.device.synchronize()

    def serve_flags(self) -> list[str]:
        return ["--device", "cuda", "--share-gpus"]

    def _eager(self, executor: Executor) -> Executor:
        """The same model without its graphs."""
        assert isinstance(executor.kernels, CudaKernels)
        runner = CudaRunner(
            self._gpu.device,
            executor.model,
            executor.kernels,
            num_token_ids=executor.num_token_ids,
        )
        return Executor(
            executor.model,
            executor.kernels,
            executor.exchange,
            max_context_tokens=executor.max_context_tokens,
            runner=runner,
        )


def cuda_backend(index: int) -> CudaBackend:
    """Of a GPU of this machine. Raises ModelError: it is not there, or FlashInfer is not."""
    gpu = open_gpu(index, CudaBackend.dtype, StepLimits(MAX_TOKENS, 64))
    device = gpu.device.torch_device

    def make(layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return exchange_on(device, layout, label, **how)

    command = (sys.executable, "-P", "-m", "gpu_workers", "check-gpu-exporter")
    return CudaBackend(gpu, make, (*command, "--device", f"cuda:{index}"))
