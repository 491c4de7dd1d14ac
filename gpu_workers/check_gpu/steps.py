"""Stages: captured steps draw what eager ones draw, and how long steps take beside their floor.

The floor is what the memory alone takes: all weights, and the keys and values that are read, over
the bandwidth of a plain copy.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import Found, require
from gpu_workers.check_gpu.tiny_models import LLAMA_3_8B, TINY, prompts, write_config
from gpu_workers.executor import Executor
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.models.registry import weight_shapes
from gpu_workers.profiling.bench import StepBench
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.stopwatch import Stopwatch
from ipc.messages import LoadFormat
from ipc.vocabulary import DType

BATCHES = (1, 8, 32, 64)
PROMPTS = (512, 2048)
CONTEXT = 512
ROUNDS = 5
SIZES = {True: (LLAMA_3_8B, BATCHES, PROMPTS), False: (TINY, (1, 4), (64,))}
KV_BYTES = {True: 16 << 30, False: 32 << 20}
COPY_BYTES = {True: 1 << 30, False: 64 << 20}


def check_graphs(
    backend: Backend, batches: Sequence[int] = (1, 3, 8, 13), num_tokens: int = 24
) -> Found:
    """Greedy tokens of batches that fill a captured size and of such that are padded to one."""
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), TINY)
        eager, graphed = (
            Driver(_executor(backend, directory, is_graphed=is_graphed, max_batch=max(batches)))
            for is_graphed in (False, True)
        )
        for batch in batches:
            asked = prompts(batch, 70)
            expected, found = eager.greedy(asked, num_tokens), graphed.greedy(asked, num_tokens)
            wrong = [i for i in range(batch) if expected[i] != found[i]]
            require(not wrong, f"of {batch} sequences, {wrong} go on otherwise when captured")
    what = "captured and eager" if backend.is_gpu else "no graphs on a CPU: two eager"
    return Found(f"{what} steps draw the same")


def measure_steps(backend: Backend) -> Found:
    """Milliseconds of decode steps, tokens per second of prompts, and their floors."""
    shape, batches, lengths = SIZES[backend.is_gpu]
    bytes_per_s = _copy_bytes_per_s(backend)
    figures: dict[str, Any] = {"copy_gb_s": bytes_per_s / 1e9}
    with tempfile.TemporaryDirectory() as directory:
        config = read_config(str(write_config(Path(directory), shape)))
        for kind in ("eager", "graphed") if backend.is_gpu else ("eager",):
            is_graphed = kind == "graphed"
            executor = _executor(backend, directory, is_graphed=is_graphed, max_batch=max(batches))
            figures[kind] = _decode(executor, batches)
            if kind == "eager":
                figures["prefill_tokens_per_s"] = _prefill(executor, lengths)
            del executor
            torch.cuda.empty_cache()
    figures["floor_ms"] = {
        batch: 1e3 * _bytes_read(config, backend.dtype, batch) / bytes_per_s for batch in batches
    }
    last = batches[-1]
    told = f"decode of {last}: {figures['eager'][last]:.2f} ms"
    return Found(f"{told}, floor {figures['floor_ms'][last]:.2f} ms", figures)


def _executor(backend: Backend, directory: str, *, is_graphed: bool, max_batch: int) -> Executor:
    is_tiny = read_config(directory).sizes.hidden_size == TINY["hidden_size"]
    spec = spec_of(directory, backend.dtype, max_context=1024 if is_tiny else 4096, is_dummy=True)
    assert spec.load_format is LoadFormat.DUMMY
    kv_bytes = KV_BYTES[backend.is_gpu and not is_tiny]
    return backend.executor(spec, kv_bytes, is_graphed=is_graphed, max_batch=max_batch)


def _decode(executor: Executor, batches: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds by batch."""
    bench = StepBench(executor, Stopwatch())
    return {batch: _best(bench, StepShape(batch=batch, context=CONTEXT)) for batch in batches}


def _prefill(executor: Executor, lengths: tuple[int, ...]) -> dict[int, float]:
    """Tokens per second by prompt length."""
    bench = StepBench(executor, Stopwatch())
    return {n: 1e3 * n / _best(bench, StepShape(num_prompts=1, num_new=n)) for n in lengths}


def _best(bench: StepBench, step: StepShape) -> float:
    return min(bench.step_ms(step) for _ in range(ROUNDS))


def _bytes_read(config: ModelConfig, dtype: DType, batch: int) -> float:
    """Of one decode step: every weight but the embedding's, and what is cached."""
    shapes = weight_shapes(config)
    weights = sum(
        torch.Size(shape).numel() for name, shape in shapes.items() if "embed_tokens" not in name
    )
    cached = batch * CONTEXT * config.kv_bytes_per_token(dtype)
    return weights * dtype.num_bytes + cached


def _copy_bytes_per_s(backend: Backend) -> float:
    """Bytes read and written by a plain copy, per second."""
    source = backend.place(torch.ones(COPY_BYTES[backend.is_gpu], dtype=torch.uint8))
    target = torch.empty_like(source)
    times_s = []
    for _ in range(ROUNDS):
        backend.synchronize()
        began_s = time.perf_counter()
        target.copy_(source)
        backend.synchronize()
        times_s.append(time.perf_counter() - began_s)
    return 2 * source.nbytes / min(times_s)
