"""Stage: what the host does before each step: index arrays, their upload, attention's plan.

Microseconds of the host's calls, by batch. With two steps under way they are hidden behind the
device as long as they are shorter than its steps; these figures say which part to look at.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.decode_rows import BLOCK_SIZE, config_of, decode_rows
from gpu_workers.check_gpu.outcome import Note
from gpu_workers.check_gpu.tiny_models import TINY
from gpu_workers.cuda_device import send
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_step import host_step
from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.scratch import Scratch
from ipc.kv_layout import blocks_for

CONTEXT = 512
BATCHES = {True: (1, 32, 64), False: (1, 8)}
ROUNDS = 30


@torch.inference_mode()
def measure_host(backend: Backend, note: Note, batches: Sequence[int] = ()) -> str:
    """Of whole preparations; on a GPU of their parts, too."""
    batches = batches or BATCHES[backend.is_gpu]
    config = config_of(TINY)
    num_blocks = max(batches) * blocks_for(CONTEXT, BLOCK_SIZE)
    width = backend.stored_head_dim(config.head_dim)
    shape = (num_blocks + 1, config.num_kv_heads, 1, 2, BLOCK_SIZE, width)
    pool = backend.place(torch.zeros(shape, dtype=TORCH_DTYPES[backend.dtype]))
    kernels = backend.kernels(config, pool, CONTEXT)
    prepare_us = 0.0
    for num_rows in batches:
        batch = decode_rows(num_rows, CONTEXT, num_blocks)
        prepare_us = _us(backend, partial(kernels.prepare, batch))
        figures = {"prepare_us": prepare_us}
        if isinstance(kernels, CudaKernels):
            figures |= _parts(backend, kernels, num_rows, num_blocks)
        note(f"batch {num_rows}", figures)
    return f"a step of {batches[-1]} is prepared in {prepare_us:.0f} us"


def _parts(
    backend: Backend, kernels: CudaKernels, num_rows: int, num_blocks: int
) -> dict[str, float]:
    """For a captured step of so many rows."""
    batch = decode_rows(num_rows, CONTEXT, num_blocks)
    host = host_step(batch, kernels.block_size)
    memory = kernels.fixed_memory(num_rows, num_blocks)
    attention = kernels.fixed_attention(memory, num_rows)
    scratch = Scratch(kernels.dtype, kernels.device.torch_device)
    step = kernels.place_fixed(host, memory, attention, scratch)
    indices = step.indices[: len(host.pages.indices)]
    wide = [host.token_ids, host.positions, host.blocks, host.offsets]
    return {
        "arrays_us": _us(backend, lambda: host_step(batch, kernels.block_size)),
        "upload_us": _us(backend, lambda: send(kernels.device, wide, memory.wide)),
        "plan_us": _us(backend, lambda: attention.plan(host, indices)),
    }


def _us(backend: Backend, act: Callable[[], object]) -> float:
    """The median of the host's calls, each on an idle device."""
    seconds = []
    for _ in range(ROUNDS):
        backend.synchronize()
        began_s = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began_s)
    backend.synchronize()
    return 1e6 * statistics.median(seconds)
