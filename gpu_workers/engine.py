"""Put one worker's engine together: configuration, pool, kernels, weights, executor.

The worker and `distserve profile` build theirs here; they differ in whose pool it is. A worker of
a parallel instance says which shard of the model is its own and how it talks to the others.
"""

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from gpu_workers.collectives import Alone, Collectives
from gpu_workers.cpu_kernels import CpuKernels
from gpu_workers.cuda_engine import Gpu, cuda_kernels, cuda_runner, on_device
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.kernels import Geometry, Kernels
from gpu_workers.kv_exchange import KVExchange
from gpu_workers.models.config import ModelConfig
from gpu_workers.models.layers import Loader
from gpu_workers.models.registry import build_model, held_names, is_optional, weight_shapes
from gpu_workers.models.rope import rope_table
from gpu_workers.native_build import native_library
from gpu_workers.native_kernels import NativeKernels, can_compute
from gpu_workers.step_plan import Pull, PullResult
from gpu_workers.weights import DummyWeights, SafetensorsWeights, WeightSource
from ipc import sharding
from ipc.kv_layout import RankLayout
from ipc.messages import LoadFormat
from ipc.sharding import Shard
from ipc.vocabulary import DType, WorkerName

logger = logging.getLogger(__name__)

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a model: fields as in `WorkerConfig`; `shard` None is the whole model."""

    model_dir: str
    dtype: DType
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    max_context_tokens: int
    num_token_ids: int | None = None
    shard: Shard | None = None

    def shard_of(self, config: ModelConfig) -> Shard:
        return self.shard or config.whole


def pool_layout(
    config: ModelConfig,
    *,
    dtype: DType,
    block_size: int,
    kv_bytes: int,
    shard: Shard | None = None,
    head_dim: int | None = None,
) -> RankLayout:
    """The layout of a pool for a shard's layers and KV heads (for all of them by default).

    All ranks of an instance have the same number of blocks: as many as fit into `kv_bytes` on the
    rank whose blocks are the largest. `head_dim` is the stored one where heads are padded.

    Raises:
        ModelError: not even one block fits.
    """
    shard = shard or config.whole
    stages = sharding.stage_layers(config.sizes, shard.parallelism.pp)
    planes = max(layers.size for layers in stages) * shard.kv_heads.size
    head_dim = head_dim or config.head_dim
    block_bytes = 2 * planes * head_dim * dtype.num_bytes * block_size
    if kv_bytes < block_bytes:
        raise ModelError(
            f"{config.name}: {kv_bytes} bytes of KV cache hold no block of {block_bytes} bytes"
        )
    return RankLayout(
        layers=shard.layers,
        heads=shard.kv_heads,
        num_blocks=kv_bytes // block_bytes,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
    )


def build_executor(
    config: ModelConfig,
    spec: EngineSpec,
    exchange: KVExchange,
    *,
    collectives: Collectives | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    gpu: Gpu | None = None,
    weights: WeightSource | None = None,
) -> Executor:
    """Load the weights and join them with the exchange's pool.

    Args:
        config: as read from `spec.model_dir`.
        exchange: owns the pool, laid out as `pool_layout` says.
        collectives: the way to the other ranks; not needed where there are none.
        progress: called with the fraction of the weights that are loaded.
        gpu: where to compute, if not on CPU. The last block of the pool is not to be handed out
            then: rows of padding use it.
        weights: those that are on the device already, for this shard.

    Raises:
        ModelError: the weights are not the model's, or the context is longer than it can be.
    """
    if spec.max_context_tokens > config.max_positions:
        raise ModelError(
            f"{config.name} takes {config.max_positions} tokens, "
            f"a context of {spec.max_context_tokens} was asked for"
        )
    shard, collectives = spec.shard_of(config), collectives or Alone()
    kernels = build_kernels(config, exchange.pool, spec.max_context_tokens, shard, gpu)
    if weights is None:
        weights = _own_weights(config, spec, progress, gpu)
    with torch.inference_mode():
        model = build_model(Loader(config, kernels, weights, shard, collectives), kernels)
    logger.info("%s loaded as %s on %s kernels", config.name, spec.dtype, kernels.name)
    runner = None
    if gpu is not None and isinstance(kernels, CudaKernels):
        runner = cuda_runner(
            gpu,
            model,
            kernels,
            collectives,
            max_context_tokens=spec.max_context_tokens,
            num_token_ids=spec.num_token_ids,
        )
    return Executor(
        model,
        kernels,
        exchange,
        max_context_tokens=spec.max_context_tokens,
        num_token_ids=spec.num_token_ids,
        collectives=collectives,
        runner=runner,
    )


def _own_weights(
    config: ModelConfig, spec: EngineSpec, progress: Callable[[float], None], gpu: Gpu | None
) -> WeightSource:
    """Loaded for this worker alone."""
    if gpu is None:
        return open_weights(config, spec, progress)
    return on_device(open_weights(config, spec, progress, gpu.device.torch_device), config, gpu)


def build_kernels(
    config: ModelConfig,
    pool: torch.Tensor,
    max_context_tokens: int,
    shard: Shard | None = None,
    gpu: Gpu | None = None,
) -> Kernels:
    """The fastest kernels that this machine has for the model, or for that shard of it.

    DISTSERVE_KERNELS in the environment forces a kind: `torch`, or `native` for compiled ones.

    Raises:
        ModelError: native kernels are forced and cannot be had.
    """
    table = None
    if config.rope is not None:
        table = rope_table(config.rope, config.head_dim, max_context_tokens)
    num_heads = (shard or config.whole).heads.size
    geometry = Geometry(num_heads, config.head_dim**-0.5, table)
    if gpu is not None:
        return cuda_kernels(pool, geometry, gpu)
    forced = os.environ.get("DISTSERVE_KERNELS")
    library = None
    if forced != "torch" and can_compute(pool, geometry.num_heads):
        library = native_library()
    if library is not None:
        return NativeKernels(library, pool, geometry)
    if forced == "native":
        raise ModelError(f"{config.name}: DISTSERVE_KERNELS=native, and they cannot be had")
    return CpuKernels(pool, geometry)


def open_weights(
    config: ModelConfig,
    spec: EngineSpec,
    progress: Callable[[float], None],
    device: torch.device | None = None,
) -> WeightSource:
    """The source that the spec names, checked against the model; random ones are made on the
    device that is to have them. Raises ModelError."""
    shapes, dtype = weight_shapes(config), TORCH_DTYPES[spec.dtype]
    taken = _counting(len(held_names(config, spec.shard_of(config))), progress)
    if spec.load_format is LoadFormat.DUMMY:
        return DummyWeights(shapes, dtype, taken=taken, device=device)
    return SafetensorsWeights(
        Path(spec.model_dir),
        shapes,
        dtype,
        optional=lambda name: is_optional(config, name),
        taken=taken,
    )


def _counting(total: int, progress: Callable[[float], None]) -> Callable[[], None]:
    """What each of `total` things calls so that `progress` hears the fraction that is done."""
    counter = itertools.count(1)
    return lambda: progress(next(counter) / total)


class PrivatePool:
    """A `KVExchange` without peers: a pool of our own and nobody to pull from."""

    def __init__(self, layout: RankLayout, device: torch.device | None = None) -> None:
        self._pool = torch.zeros(layout.shape, dtype=TORCH_DTYPES[layout.dtype], device=device)

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        raise AssertionError(f"a private pool has no peers, and {worker} is one")

    def unmap_instance(self, instance: str, epoch: int) -> None:
        """Nothing was ever mapped."""

    def knows(self, instance: str, epoch: int) -> bool:
        return False

    def begin(self, pull: Pull) -> None:
        raise AssertionError(f"a private pool has no peers, and {pull.handle.owner} is one")

    def finished(self) -> list[PullResult]:
        return []
