"""What a worker will need of its GPU's memory, reckoned before any of it is taken.

Pure arithmetic over a model's shapes and a worker's limits. It decides how large the KV pool can be
under a share of the device (`gpu_memory_utilization`), and what an operator is told where it does
not fit: what takes how much.
"""

import math

import msgspec

from gpu_workers.cuda_attention import (
    GRAPH_PLAN_BYTES,
    WRAPPER_BYTES,
    stored_head_dim,
    workspace_bytes,
)
from gpu_workers.cuda_graphs import graph_sizes
from gpu_workers.cuda_sampler import PART_ROWS, SAMPLING_BYTES
from gpu_workers.cuda_weights import HEAD_COLUMNS, HEAD_ROWS
from gpu_workers.errors import ModelError
from gpu_workers.models.config import ModelConfig
from gpu_workers.models.registry import held_names, weight_shapes
from ipc.sharding import Shard
from ipc.vocabulary import DType

# What is ours but not in any tensor of ours: CUDA's context, cuBLAS' workspaces, loaded kernels. A
# guess on the safe side, since it cannot be asked for before it is taken.
OVERHEAD_BYTES = 1 << 30
NCCL_BYTES = 1 << 30  # its buffers where there are other ranks; a guess, too
GRAPH_BYTES = 8 << 20  # what CUDA keeps of a captured graph beside its tensors; a guess, too
EAGER_WRAPPERS = 4  # of prompts and of decode rows, by turns
ROPE_BYTES = 4  # fp32
PER_TOKEN_COPIES = 4  # residual, its norm, a product's result, an embedding: (T, hidden) each
GIB = 2**30


class StepLimits(msgspec.Struct, frozen=True):
    """The largest steps there can be: tokens of prompts, and rows of decode."""

    max_tokens: int
    max_batch: int


class MemoryNeeds(msgspec.Struct, frozen=True):
    """Bytes of one worker, KV pool apart."""

    weights: int
    activations: int
    graphs: int
    workspaces: int
    overhead: int = OVERHEAD_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.workspaces + self.overhead


class MemoryPlan(msgspec.Struct, frozen=True):
    """What a worker takes of its GPU."""

    needs: MemoryNeeds
    kv_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        return (
            f"{described(self.needs)}, KV cache {_gib(self.kv_bytes)}, "
            f"together {_gib(self.needs.total + self.kv_bytes)} of {_gib(self.total_bytes)}"
        )


def memory_needs(
    config: ModelConfig, shard: Shard, dtype: DType, limits: StepLimits, *, has_graphs: bool
) -> MemoryNeeds:
    """Of the worker that holds that shard. Raises ModelError: heads are too wide for a GPU.

    Args:
        has_graphs: whether steps will be captured; other ranks are heard by NCCL then, else not.
    """
    sizes = graph_sizes(limits.max_batch) if has_graphs else []
    has_nccl = has_graphs and shard.parallelism.num_workers > 1
    return MemoryNeeds(
        weights=weight_bytes(config, shard, dtype),
        activations=_activation_bytes(config, shard, dtype, limits.max_tokens)
        + _drawing_bytes(config, shard, dtype, limits.max_batch),
        graphs=_graph_bytes(config, shard, dtype, sizes),
        workspaces=_workspace_bytes(config, shard, limits, sizes),
        overhead=OVERHEAD_BYTES + (NCCL_BYTES if has_nccl else 0),
    )


def weight_bytes(config: ModelConfig, shard: Shard, dtype: DType) -> int:
    """Of a shard's tensors as they lie on the device, padded heads included."""
    shapes = weight_shapes(config)
    elements = sum(
        math.prod(shapes[name]) * _share(name, config, shard) for name in held_names(config, shard)
    )
    return round(elements) * dtype.num_bytes


def pool_bytes(needs: MemoryNeeds, total_bytes: int, utilization: float) -> int:
    """What is left for keys and values under that share of the device's memory.

    Raises:
        ModelError: nothing is left.
    """
    left = int(total_bytes * utilization) - needs.total
    if left <= 0:
        raise ModelError(
            f"{utilization:g} of the GPU's {_gib(total_bytes)} leave nothing for the KV cache: "
            f"{described(needs)}"
        )
    return left


def check_free(needs: MemoryNeeds, kv_bytes: int, free_bytes: int, total_bytes: int) -> None:
    """Raises ModelError: all that is to be taken does not fit into what is free."""
    wanted = needs.total + kv_bytes
    if wanted > free_bytes:
        raise ModelError(
            f"the GPU has {_gib(free_bytes)} free of {_gib(total_bytes)}, and "
            f"{_gib(wanted)} are needed: {described(needs)}, KV cache {_gib(kv_bytes)}"
        )


def described(needs: MemoryNeeds) -> str:
    """What takes how much, for people."""
    parts = {
        "weights": needs.weights,
        "activations of the largest step": needs.activations,
        "decode graphs": needs.graphs,
        "attention workspaces": needs.workspaces,
        "CUDA itself": needs.overhead,
    }
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def _activation_bytes(config: ModelConfig, shard: Shard, dtype: DType, num_tokens: int) -> int:
    """The tensors that exist at the same time in a step, at most; logits apart."""
    head_dim = stored_head_dim(config.head_dim)
    qkv = (shard.heads.size + 2 * shard.kv_heads.size) * head_dim
    attended = shard.heads.size * head_dim
    mlp = 3 * shard.columns.size  # gate, up and their product
    per_token = PER_TOKEN_COPIES * config.hidden_size + qkv + attended + mlp
    return num_tokens * per_token * dtype.num_bytes


def _logit_bytes(config: ModelConfig, shard: Shard, dtype: DType, num_rows: int) -> int:
    """Our columns; on the rank that draws those of all ranks too, gathered and put in order."""
    if not shard.is_last_stage:
        return 0
    columns = shard.vocab.size
    if shard.parallelism.tp > 1 and shard.tp_rank == 0:
        columns += 2 * config.vocab_size
    return num_rows * columns * dtype.num_bytes


def _drawing_bytes(config: ModelConfig, shard: Shard, dtype: DType, num_rows: int) -> int:
    """Logits, and what drawing from a part of them takes."""
    drawn = min(num_rows, PART_ROWS) * config.vocab_size * SAMPLING_BYTES
    return _logit_bytes(config, shard, dtype, num_rows) + (drawn if _draws(shard) else 0)


def _graph_bytes(config: ModelConfig, shard: Shard, dtype: DType, sizes: list[int]) -> int:
    """All graphs share the memory of the largest, and the place where results are left."""
    if not sizes:
        return 0
    rows = sizes[-1]
    tensors = _activation_bytes(config, shard, dtype, rows)
    logits = _logit_bytes(config, shard, dtype, rows)
    columns = config.hidden_size + (config.vocab_size if _draws(shard) else 0)
    return tensors + logits + rows * columns * dtype.num_bytes + len(sizes) * GRAPH_BYTES


def _draws(shard: Shard) -> bool:
    return shard.is_last_stage and shard.tp_rank == 0


def _workspace_bytes(
    config: ModelConfig, shard: Shard, limits: StepLimits, sizes: list[int]
) -> int:
    """FlashInfer's, and the rotary table."""
    shape = (shard.heads.size, shard.kv_heads.size, stored_head_dim(config.head_dim))
    eager = workspace_bytes(*shape)
    captured = workspace_bytes(*shape, graph_rows=max(sizes, default=0))
    plans = EAGER_WRAPPERS * WRAPPER_BYTES + len(sizes) * GRAPH_PLAN_BYTES
    rope = limits.max_tokens * config.head_dim * ROPE_BYTES if config.rope else 0
    return eager + (captured if captured > eager else 0) + plans + rope


def _share(name: str, config: ModelConfig, shard: Shard) -> float:
    """Of a whole tensor, what lies on this device; more than all of it where heads are padded."""
    if HEAD_ROWS.search(name) or HEAD_COLUMNS.search(name):
        is_kv = ".k_proj." in name or ".v_proj." in name
        here, there = (
            (shard.kv_heads.size, config.num_kv_heads)
            if is_kv
            else (shard.heads.size, config.num_heads)
        )
        return here / there * stored_head_dim(config.head_dim) / config.head_dim
    if ".mlp." in name or ".fc1." in name or ".fc2.weight" in name:
        is_whole = ".down_proj.bias" in name
        return 1.0 if is_whole else shard.columns.size / config.intermediate_size
    if "embed_tokens." in name or "lm_head." in name:
        return shard.vocab.size / config.vocab_size
    return 1.0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
