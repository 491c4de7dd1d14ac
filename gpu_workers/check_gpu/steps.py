"""Stage: how long steps of a large model take, beside their floors.

Decode steps eager, captured, and captured with as many under way as a service has; prompts. The
floor of a decode step is what memory alone takes: all weights and the keys and values that are
read, over the bandwidth of a plain copy. That of a prompt is what products alone take: two
operations a weight and token, and those of attention, at the rate of a large product.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.outcome import Note
from gpu_workers.check_gpu.tiny_models import LLAMA_3_8B, TINY, write_config
from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.executor import Executor
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.models.registry import weight_shapes
from gpu_workers.profiling.bench import StepBench
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.stopwatch import Stopwatch
from ipc.vocabulary import DType

CONTEXT = 512
ROUNDS = 5


class Size:
    """How large a model and how large steps."""

    def __init__(
        self,
        shape: Mapping[str, Any],
        batches: Sequence[int],
        lengths: Sequence[int],
        *,
        max_context: int,
        kv_bytes: int,
        copy_bytes: int,
        product_width: int,
    ) -> None:
        self.shape, self.batches, self.lengths = shape, batches, lengths
        self.max_context, self.kv_bytes = max_context, kv_bytes
        self.copy_bytes, self.product_width = copy_bytes, product_width


SMALL = Size(
    TINY,
    (1, 4),
    (64,),
    max_context=1024,
    kv_bytes=32 << 20,
    copy_bytes=64 << 20,
    product_width=512,
)
LARGE = Size(
    LLAMA_3_8B,
    (1, 8, 32, 64),
    (512, 2048),
    max_context=4096,
    kv_bytes=16 << 30,
    copy_bytes=1 << 30,
    product_width=8192,
)


def measure_steps(backend: Backend, note: Note, size: Size | None = None) -> str:
    """Milliseconds of decode steps, tokens per second of prompts, and their floors."""
    size = size or (LARGE if backend.is_gpu else SMALL)
    bytes_per_s = _copy_bytes_per_s(backend, size.copy_bytes)
    operations_per_s = _operations_per_s(backend, size.product_width)
    note("copy_gb_s", bytes_per_s / 1e9)
    note("product_tflop_s", operations_per_s / 1e12)
    with tempfile.TemporaryDirectory() as directory:
        config = read_config(str(write_config(Path(directory), dict(size.shape))))
        executor = _executor(backend, directory, size, note)
    floors = {
        batch: 1e3 * _bytes_read(config, backend.dtype, batch) / bytes_per_s
        for batch in size.batches
    }
    note("decode_floor_ms", floors)
    eager, served = (
        StepBench(engine, _stopwatch(backend), _num_blocks(backend, executor))
        for engine in (backend.eager(executor), executor)
    )
    decode: dict[int, float] = {}
    for name, run in _kinds(backend, eager, served):
        decode = {batch: _best(run, StepShape(batch=batch, context=CONTEXT)) for batch in floors}
        note(name, decode)
    for length in size.lengths:
        floor_ms = 1e3 * _operations(config, length) / operations_per_s
        note(f"prefill {length}", _prompt(eager, length, floor_ms))
    backend.release(executor.exchange)
    last = size.batches[-1]
    return f"decode of {last}: {decode[last]:.2f} ms, floor {floors[last]:.2f} ms"


def _prompt(eager: StepBench, num_tokens: int, floor_ms: float) -> dict[str, float]:
    """The figures of one prompt alone."""
    ms = _best(eager.step_ms, StepShape(num_prompts=1, num_new=num_tokens))
    return {"tokens_per_s": 1e3 * num_tokens / ms, "ms": ms, "floor_ms": floor_ms}


def _kinds(
    backend: Backend, eager: StepBench, served: StepBench
) -> list[tuple[str, Callable[[StepShape], float]]]:
    """Ways of running decode steps, the one that serves last."""
    if not backend.is_gpu:
        return [("decode_eager_ms", eager.step_ms)]
    return [
        ("decode_eager_ms", eager.step_ms),
        ("decode_captured_ms", served.step_ms),
        ("decode_served_ms", served.served_ms),
    ]


def _executor(backend: Backend, directory: str, size: Size, note: Note) -> Executor:
    began_s = time.monotonic()
    spec = spec_of(directory, backend.dtype, max_context=size.max_context, is_dummy=True)
    executor = backend.executor(spec, size.kv_bytes, max_batch=max(size.batches))
    executor.exchange.pool.fill_(0.5)  # so that its memory is there
    note("engine_made_s", time.monotonic() - began_s)
    return executor


def _stopwatch(backend: Backend) -> Stopwatch:
    return Stopwatch(is_alone=not backend.is_gpu, settle=backend.synchronize)


def _num_blocks(backend: Backend, executor: Executor) -> int:
    return len(executor.exchange.pool) - backend.num_spare_blocks


def _best(run: Callable[[StepShape], float], step: StepShape) -> float:
    return min(run(step) for _ in range(ROUNDS))


def _bytes_read(config: ModelConfig, dtype: DType, batch: int) -> float:
    """Of one decode step: every weight but the embedding's, and what is cached."""
    cached = batch * CONTEXT * config.kv_bytes_per_token(dtype)
    return _num_weights(config) * dtype.num_bytes + cached


def _operations(config: ModelConfig, num_tokens: int) -> float:
    """Of a prompt, whose last token alone goes through the head; each token attends to half of
    the prompt in the mean."""
    head = config.vocab_size * config.hidden_size
    width = config.num_heads * config.head_dim
    attended = 2 * num_tokens * num_tokens * width * config.num_layers
    return 2.0 * num_tokens * (_num_weights(config) - head) + 2.0 * head + attended


def _num_weights(config: ModelConfig) -> int:
    shapes = weight_shapes(config)
    return sum(torch.Size(shapes[name]).numel() for name in shapes if "embed_tokens" not in name)


def _copy_bytes_per_s(backend: Backend, num_bytes: int) -> float:
    """Bytes read and written by a plain copy, per second."""
    source = backend.place(torch.ones(1, dtype=torch.uint8)).new_ones(num_bytes)
    target = torch.empty_like(source)
    return 2 * num_bytes / _quickest_s(backend, lambda: target.copy_(source))


def _operations_per_s(backend: Backend, width: int) -> float:
    """Of a product of two square matrices."""
    matrix = backend.place(torch.randn(width, width).to(TORCH_DTYPES[backend.dtype]))
    product = torch.empty_like(matrix)
    seconds = _quickest_s(backend, lambda: torch.mm(matrix, matrix, out=product))
    return 2 * width**3 / seconds


def _quickest_s(backend: Backend, act: Callable[[], object]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        backend.synchronize()
        began_s = time.perf_counter()
        act()
        backend.synchronize()
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)
