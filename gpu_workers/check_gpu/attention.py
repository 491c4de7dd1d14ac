"""Stage: attention over paged keys and values, against plain attention in fp32.

All widths of heads that are compiled for, two that are padded to one, all ratios of query heads to
KV heads that models have, both element types; see `attention_case` for the steps. A width whose
module is not compiled is compiled here, as long as the time for that is not over.
"""

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpu_workers.check_gpu.attention_case import Case
from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import CheckFailed, Note, require
from ipc.vocabulary import DType

TOLERANCE = {DType.BF16: 2e-2, DType.FP16: 3e-3, DType.FP32: 1e-4}
COMPILING_S = 45.0  # after so many nothing more is compiled
RATIOS = (1, 3, 4, 7, 8)  # of query heads to KV heads


class Heads(NamedTuple):
    """A shape: `Heads(128, 8, 2)` are 8 heads of 128 on 2 KV heads."""

    head_dim: int
    num_heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.head_dim}x{self.num_heads}/{self.kv_heads}"


def _of(head_dim: int, ratios: Sequence[int]) -> list[Heads]:
    return [Heads(head_dim, 2 * ratio, 2) for ratio in ratios]


HEADS = (
    *_of(128, RATIOS),
    *_of(64, RATIOS),
    Heads(128, 7, 1),
    *_of(80, (1, 4)),
    *_of(96, (1, 3)),
    *_of(256, (1, 4, 8)),
)
DTYPES = (DType.BF16, DType.FP16)


def check_attention(
    backend: Backend,
    note: Note,
    heads: Sequence[Heads] = HEADS,
    dtypes: Sequence[DType] = DTYPES,
) -> str:
    """Every shape in every element type; the largest error of each."""
    began_s, errors, left_out = time.monotonic(), [], 0
    for dtype, shape in itertools.product(dtypes, heads):
        name = f"{dtype.value} {shape}"
        is_late = time.monotonic() - began_s > COMPILING_S
        if is_late and not backend.is_compiled(dtype, shape.head_dim):
            note(name, "left out: its module is not compiled, and the time for that was over")
            left_out += 1
            continue
        try:
            errors.append(_largest_error(backend, dtype, shape))
        except CheckFailed:
            raise
        except Exception as error:
            if backend.is_compiled(dtype, shape.head_dim):
                raise
            note(name, f"left out: its module cannot be compiled: {str(error)[:200]}")
            left_out += 1
            continue
        note(name, errors[-1])
    require(bool(errors), "no module of attention is compiled, and none could be in time")
    told = f", {left_out} left out" if left_out else ""
    return f"largest error {max(errors):.1e} over {len(errors)} shapes{told}"


def _largest_error(backend: Backend, dtype: DType, shape: Heads) -> float:
    case = Case(backend, dtype, *shape)
    with torch.inference_mode():
        errors = {kind: case.step(rows) for kind, rows in case.steps().items()}
    limit = TOLERANCE[dtype]
    for kind, error in errors.items():
        require(
            error < limit,
            f"{dtype.value}: {kind} with {shape.num_heads} heads of {shape.head_dim} on "
            f"{shape.kv_heads} KV heads are off by {error:.3g}, at most {limit} was expected",
        )
    case.check_pool()
    return max(errors.values())
