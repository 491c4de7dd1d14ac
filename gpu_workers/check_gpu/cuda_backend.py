"""One GPU as the check sees it. Only loaded where one is checked."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from gpu_workers import cuda_build
from gpu_workers.check_gpu.backend import Module
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_device import CudaDevice
from gpu_workers.cuda_engine import Gpu, open_gpu
from gpu_workers.cuda_exchange import CudaExchange, exchange_on
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_runner import CudaRunner
from gpu_workers.engine import EngineSpec, build_executor, build_kernels, pool_layout
from gpu_workers.executor import Executor
from gpu_workers.kernels import Kernels
from gpu_workers.kv_exchange import KVExchange, OwnExchange
from gpu_workers.models.config import ModelConfig, read_config
from ipc.kv_layout import RankLayout
from ipc.vocabulary import DType

MAX_TOKENS = 4096
BLOCK_SIZE = 16
SHORT = {DType.BF16: "bf16", DType.FP16: "fp16"}
EXTRAS = ("rope", "page", "silu")
ATTENTION = ((("bf16",), (128, 64)), (("fp16",), (128, 64)), (("bf16", "fp16"), (256,)))
"""Element types and widths, those that most models have first."""

Modules = Callable[[Iterable[str], Iterable[int], Iterable[str]], Iterable[tuple[str, Any]]]


class CudaBackend:
    """A GPU, with pools that are opened by CUDA IPC.

    Args:
        gpu: the device and the library that computes attention on it.
        make_exchange: how a pool is made there.
        exporter_command: starts a process with pools on the same device.
        modules: descriptions of the library's modules, as `cuda_build.modules` gives them.
        devices: what a service is told to use, where it is not all GPUs.
        afresh: the same GPU as another engine sees it. The pool of memory that all graphs of one
            share cannot be used again when they are gone.
    """

    dtype = DType.BF16
    is_gpu = True
    num_spare_blocks = 1  # which rows of padding read and write

    def __init__(
        self,
        gpu: Gpu,
        make_exchange: Callable[..., OwnExchange],
        exporter_command: Sequence[str],
        *,
        modules: Modules = cuda_build.modules,
        devices: Sequence[str] = (),
        afresh: Callable[[Gpu], Gpu] = lambda gpu: gpu,
    ) -> None:
        self._gpu = gpu
        self._device = gpu.device.torch_device
        self._make_exchange = make_exchange
        self.exporter_command = exporter_command
        self._modules = modules
        self._devices = devices
        self._afresh = afresh
        self.name = str(self._device)

    def stored_head_dim(self, head_dim: int) -> int:
        return stored_head_dim(head_dim)

    def modules(self) -> Sequence[Module]:
        wanted = list(self._modules((), (), EXTRAS))
        for dtypes, head_dims in ATTENTION:
            wanted += self._modules(dtypes, head_dims, ())
        return [
            Module(name, partial(_is_compiled, generate), partial(_load, generate))
            for name, generate in wanted
        ]

    def is_compiled(self, dtype: DType, head_dim: int) -> bool:
        ((_, generate),) = self._modules((SHORT[dtype],), (stored_head_dim(head_dim),), ())
        return _is_compiled(generate)

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return self._make_exchange(layout, label, **how)

    def release(self, exchange: KVExchange) -> None:
        assert isinstance(exchange, CudaExchange)
        exchange.close()
        exchange.free()

    def kernels(self, config: ModelConfig, pool: torch.Tensor, max_context: int) -> Kernels:
        return build_kernels(config, pool, max_context, gpu=self._gpu)

    def executor(self, spec: EngineSpec, kv_bytes: int, *, max_batch: int) -> Executor:
        config = read_config(spec.model_dir)
        layout = pool_layout(
            config,
            dtype=spec.dtype,
            block_size=BLOCK_SIZE,
            kv_bytes=kv_bytes,
            head_dim=stored_head_dim(config.head_dim),
        )
        limits = StepLimits(MAX_TOKENS, max_batch)
        gpu = dataclasses.replace(self._afresh(self._gpu), limits=limits)
        return build_executor(config, spec, self.exchange(layout, "check"), gpu=gpu)

    def eager(self, executor: Executor) -> Executor:
        assert isinstance(executor.kernels, CudaKernels)
        runner = CudaRunner(
            executor.kernels.device,
            executor.model,
            executor.kernels,
            num_token_ids=executor.num_token_ids,
        )
        return Executor(
            executor.model,
            executor.kernels,
            executor.exchange,
            max_context_tokens=executor.max_context_tokens,
            num_token_ids=executor.num_token_ids,
            runner=runner,
        )

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, copy=True)

    def synchronize(self) -> None:
        self._gpu.device.synchronize()

    def serve_flags(self) -> list[str]:
        named = ["--devices", ",".join(self._devices)] if self._devices else []
        return ["--device", "cuda", "--share-gpus", *named]


def cuda_backend(index: int) -> CudaBackend:
    """Of a GPU of this machine. Raises ModelError: it is not there, or FlashInfer is not."""
    gpu = open_gpu(index, CudaBackend.dtype, StepLimits(MAX_TOKENS, 64))
    device = gpu.device.torch_device

    def make(layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return exchange_on(device, layout, label, **how)

    command = (sys.executable, "-P", "-m", "gpu_workers", "check-gpu-exporter")
    exporter = (*command, "--device", f"cuda:{index}")
    uuid = torch.cuda.get_device_properties(device).uuid
    # A service counts its GPUs from 0 on, as we do: only another one has to be named.
    return CudaBackend(
        gpu,
        make,
        exporter,
        devices=[f"GPU-{uuid}"] if index else (),
        afresh=lambda gpu: dataclasses.replace(gpu, device=CudaDevice(index)),
    )


def _is_compiled(generate: Callable[[], Any]) -> bool:
    return bool(generate().is_compiled)


def _load(generate: Callable[[], Any]) -> None:
    """As the kernels themselves will, who find it compiled then."""
    generate().build_and_load()
