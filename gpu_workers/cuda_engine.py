"""A worker's engine on a GPU put together: device, memory, kernels, graphs, runner.

The counterpart of what `engine` does on CPU, and called from there. A worker on CPU imports it too,
which costs next to nothing: FlashInfer, which does cost, is imported when a GPU is opened.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from gpu_workers.collectives import Collectives
from gpu_workers.cuda_attention import load_flashinfer, stored_head_dim
from gpu_workers.cuda_device import CudaDevice, Device
from gpu_workers.cuda_graphs import DecodeGraphs
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_memory import (
    MemoryNeeds,
    MemoryPlan,
    StepLimits,
    check_free,
    memory_needs,
    pool_bytes,
)
from gpu_workers.cuda_runner import CudaRunner
from gpu_workers.cuda_switches import Switches
from gpu_workers.cuda_weights import DeviceWeights
from gpu_workers.errors import ModelError
from gpu_workers.kernels import Geometry
from gpu_workers.models.config import ModelConfig
from gpu_workers.models.layers import Model
from gpu_workers.weights import WeightSource
from ipc.kv_layout import RankLayout
from ipc.sharding import Shard
from ipc.vocabulary import DeviceKind, DType, Parallelism

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Where a worker computes, with what, and how large its steps may be.

    `capturing` is called with the fraction of the decode graphs that are captured.
    """

    device: Device
    flashinfer: Any
    limits: StepLimits
    capturing: Callable[[float], None] = lambda fraction: None


def wants_gpu(kind: DeviceKind) -> bool:
    """Whether a worker of that kind computes on a GPU."""
    return kind is DeviceKind.CUDA or (kind is DeviceKind.AUTO and torch.cuda.is_available())


def open_gpu(
    index: int,
    dtype: DType,
    limits: StepLimits,
    capturing: Callable[[float], None] = lambda fraction: None,
) -> Gpu:
    """A GPU of this machine.

    Raises:
        ModelError: there is none of that number, FlashInfer is not installed, or the element type
            is not one of its.
    """
    if dtype is DType.FP32:
        raise ModelError("attention on GPUs is in 16 bit: dtype bfloat16 or float16, not float32")
    count = torch.cuda.device_count()
    if index >= count:
        raise ModelError(f"there is no GPU {index}: CUDA sees {count} here")
    flashinfer = load_flashinfer()
    return Gpu(CudaDevice(index), flashinfer, limits, capturing)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker wants of its GPU's memory: `kv_bytes` for its pool, or what `utilization` of
    all of it leaves.

    `has_weights` says that those are there already, `has_graphs` that steps will be captured: by
    ranks that each have a GPU of their own, and so talk by NCCL.
    """

    kv_bytes: int
    utilization: float | None = None
    has_weights: bool = False
    has_graphs: bool = True


def reckon_pool(
    gpu: Gpu, config: ModelConfig, shard: Shard, dtype: DType, claim: Claim
) -> MemoryPlan:
    """How large this worker's KV pool is to be, once all else is known to fit beside it.

    Under a utilisation all ranks of an instance reckon with the one that needs the most, so that
    they come to the same number on equal GPUs.

    Raises:
        ModelError: it does not fit; says what takes how much.
    """
    free_bytes, total_bytes = gpu.device.memory()

    def needs(of: Shard) -> MemoryNeeds:
        return memory_needs(config, of, dtype, gpu.limits, has_graphs=claim.has_graphs)

    ours, kv_bytes = needs(shard), claim.kv_bytes
    if claim.utilization is not None:
        most = max(map(needs, _all_shards(config, shard.parallelism)), key=lambda n: n.total)
        kv_bytes = pool_bytes(most, total_bytes, claim.utilization)
    if claim.has_weights:
        ours = msgspec.structs.replace(ours, weights=0)
    check_free(ours, kv_bytes, free_bytes, total_bytes)
    plan = MemoryPlan(ours, kv_bytes, total_bytes)
    logger.info("of the GPU's memory: %s", plan)
    return plan


@contextmanager
def explaining(plan: MemoryPlan) -> Iterator[None]:
    """Raises ModelError where the memory does not do after all: with what was to take how much."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the GPU's memory does not do for {plan}: {error}") from error


def usable(layout: RankLayout) -> RankLayout:
    """A pool's layout without the block that rows of padding use. Raises ModelError: none left."""
    if layout.num_blocks < 2:
        raise ModelError("the KV cache is one block, which is for padding: more is needed")
    return msgspec.structs.replace(layout, num_blocks=layout.num_blocks - 1)


def cuda_kernels(pool: torch.Tensor, geometry: Geometry, gpu: Gpu) -> CudaKernels:
    """Kernels over a pool on that GPU. Raises ModelError: DISTSERVE_FLASHINFER is wrong."""
    switches = Switches.from_environment()
    kernels = CudaKernels(pool, geometry, gpu.device, gpu.flashinfer, switches)
    started_s = time.monotonic()
    kernels.warm_up()
    logger.info("%s kernels are there after %.1f s", kernels.name, time.monotonic() - started_s)
    return kernels


def on_device(weights: WeightSource, config: ModelConfig, gpu: Gpu) -> DeviceWeights:
    """The weights' way to the GPU, padded where they must be."""
    return DeviceWeights(
        weights,
        gpu.device.torch_device,
        head_dim=config.head_dim,
        stored=stored_head_dim(config.head_dim),
    )


def cuda_runner(
    gpu: Gpu,
    model: Model,
    kernels: CudaKernels,
    collectives: Collectives,
    *,
    max_context_tokens: int,
    num_token_ids: int | None = None,
) -> CudaRunner:
    """Steps of that model; captures the graphs of its decode steps, where the device can carry out
    all of them.

    Args:
        num_token_ids: as in `Executor`.
    """
    vocab_size = model.config.vocab_size
    stage = collectives.on_device
    graphs = None
    if stage is not None:
        graphs = DecodeGraphs(kernels, model, gpu.limits.max_batch, max_context_tokens)
        stage.close_before(graphs.close)
        stage.assemble()
        graphs.capture(gpu.capturing)
    return CudaRunner(
        gpu.device,
        model,
        kernels,
        num_token_ids=min(num_token_ids or vocab_size, vocab_size),
        graphs=graphs,
        # Between stages drawn tokens go by plans: what two ranks send each other is one queue to
        # NCCL, in which tokens on their way back would wait behind the next hidden states.
        stage=stage if model.shard.parallelism.pp == 1 else None,
    )


def _all_shards(config: ModelConfig, parallelism: Parallelism) -> list[Shard]:
    return [
        config.shard(parallelism, stage, tp_rank)
        for stage in range(parallelism.pp)
        for tp_rank in range(parallelism.tp)
    ]
