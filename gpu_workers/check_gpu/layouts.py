"""Stage: what it costs attention that a pool holds whole blocks and not a pool for each layer.

A block's layers lie side by side, so that a pull of it is one copy; one layer's pages then lie far
apart, and more of the device's address translation is used up in reading them. Decode attention
over all layers is timed on such a pool, and on one whose layers are apart. A question, not a
condition: the answer says whether the layout should be thought over.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.decode_rows import BLOCK_SIZE, config_of, decode_rows
from gpu_workers.check_gpu.outcome import Note, Skipped
from gpu_workers.check_gpu.tiny_models import LLAMA_3_8B
from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.kernels import Kernels
from gpu_workers.models.config import ModelConfig
from ipc.kv_layout import blocks_for

ROUNDS = 5


class Load(NamedTuple):
    """What is read: keys and values of so many sequences of a model of that shape."""

    shape: Mapping[str, Any] = LLAMA_3_8B
    num_rows: int = 64
    context: int = 2048


LLAMA = Load()


def compare_layouts(backend: Backend, note: Note, load: Load = LLAMA) -> str:
    """Milliseconds of attention in all layers, by layout."""
    if not backend.is_gpu:
        raise Skipped("it is a GPU's address translation that is looked at")
    config = config_of(load.shape)
    blocks = load.num_rows * blocks_for(load.context, BLOCK_SIZE) + backend.num_spare_blocks
    pair = (2, BLOCK_SIZE, backend.stored_head_dim(config.head_dim))
    heads, layers = config.num_kv_heads, config.num_layers
    scalar = backend.place(torch.zeros(1, dtype=TORCH_DTYPES[backend.dtype]))
    whole = _ms(backend, config, scalar.new_zeros((blocks, heads, layers, *pair)), load)
    note("block_major_ms", whole)
    apart = scalar.new_zeros((layers, blocks, heads, *pair)).permute(1, 2, 0, 3, 4, 5)
    by_layer = _ms(backend, config, apart, load)
    num_bytes = load.num_rows * load.context * config.kv_bytes_per_token(backend.dtype)
    note("per_layer_ms", by_layer)
    note("block_major_gb_s", 1e-6 * num_bytes / whole)
    note("block_major_takes_times", whole / by_layer)
    return f"attention over whole blocks takes {whole / by_layer:.3f} of the time over layers apart"


def _ms(backend: Backend, config: ModelConfig, pool: torch.Tensor, load: Load) -> float:
    kernels = backend.kernels(config, pool, load.context)
    batch = decode_rows(load.num_rows, load.context, len(pool) - backend.num_spare_blocks)
    width = (config.num_heads + 2 * config.num_kv_heads) * pool.shape[5]
    qkv = pool.new_ones((load.num_rows, width))
    with torch.inference_mode():
        kernels.prepare(batch)
        return min(_once_ms(backend, kernels, qkv, config.num_layers) for _ in range(ROUNDS))


def _once_ms(backend: Backend, kernels: Kernels, qkv: torch.Tensor, num_layers: int) -> float:
    backend.synchronize()
    began_s = time.perf_counter()
    for layer in range(num_layers):
        kernels.attention(layer, qkv)
    backend.synchronize()
    return 1e3 * (time.perf_counter() - began_s)
