"""One batch over sequences with a past, computed by compiled kernels and by torch's, and compared.

A bound says how far rounding may go. In bf16 a result is rounded once: half a unit in the last
place is 2^-9 of its size, and what was rounded before it (rotated queries, attention weights) adds
about as much again. In fp32 sums of a few hundred terms in another order differ by some 1e-6 of the
terms' size.
"""

import itertools
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from gpu_workers.batch import Batch, BatchRow
from gpu_workers.cpu_kernels import CpuKernels
from gpu_workers.kernels import Geometry
from gpu_workers.native_build import Isa, load
from gpu_workers.native_kernels import NativeKernels
from gpu_workers.sequence_table import IntArray, Sequence

BF16, FP32 = torch.bfloat16, torch.float32
BOUNDS = {BF16: 2.0**-7, FP32: 1e-5}  # of the largest magnitude there is in the result


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, *, bound: float | None = None
) -> None:
    """Differences are measured against the largest magnitude that is expected."""
    bound = BOUNDS[found.dtype] if bound is None else bound
    scale = float(expected.abs().max())
    assert float((found.double() - expected.double()).abs().max()) <= bound * scale


class Scene:
    """A pool with the past of some sequences in scattered blocks, and one batch over them.

    Rows are (tokens computed already, new tokens), decode rows first. The reference is the torch
    kernels in fp32 on the same numbers; the pool of the compiled ones is NaN wherever no token is.
    """

    def __init__(
        self,
        rows: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 64,
        block_size: int = 16,
        has_rope: bool = True,
    ) -> None:
        num_heads, kv_heads = heads
        widths = [-(-sum(row) // block_size) for row in rows]
        order = torch.randperm(sum(widths) + 3).tolist()
        table = np.full((len(rows), max(widths)), 10**6)  # past a row's end: never to be followed
        for line, width in zip(table, widths, strict=True):
            line[:width] = [order.pop() for _ in range(width)]
        self.batch = make_batch(rows, table, block_size)
        self.past = random(sum(widths) + 3, kv_heads, 2, 2, block_size, head_dim, dtype=dtype)
        self.nobodys = torch.ones(len(self.past), block_size, dtype=torch.bool)
        for line, row in zip(table, rows, strict=True):
            positions = np.arange(sum(row))
            self.nobodys[line[positions // block_size], positions % block_size] = False
        tokens = self.batch.num_tokens
        self.qkv = random(tokens, (num_heads + 2 * kv_heads) * head_dim, dtype=dtype)
        angles = torch.rand(max(map(sum, rows)), head_dim // 2) * 6
        rope = torch.stack((angles.cos(), angles.sin()), dim=1) if has_rope else None
        self.geometry = Geometry(num_heads, head_dim**-0.5, rope)

    def check(self, isa: Isa) -> None:
        """Both kernel sets, one after the other: results, the pool, and q for what follows."""
        pool, expected_pool = self.past.clone(), self.past.float()
        _tokens_of(pool)[self.nobodys] = torch.nan
        kernels = NativeKernels(load(isa), pool, self.geometry)
        reference = CpuKernels(expected_pool, self.geometry, packed=False)
        found, expected = self.run(kernels, self.qkv.clone()), self.run(reference, self.qkv.float())
        assert_close(found, expected)
        assert bool(_tokens_of(pool)[self.nobodys].isnan().all())
        mine = ~self.nobodys
        assert_close(_tokens_of(pool)[mine], _tokens_of(expected_pool)[mine])
        assert torch.equal(pool[:, :, 0].nan_to_num(), self.kept_layer().nan_to_num())

    def run(self, kernels: NativeKernels | CpuKernels, qkv: torch.Tensor) -> torch.Tensor:
        kernels.prepare(self.batch)
        kernels.append(1, qkv)
        return kernels.attention(1, qkv).clone()

    def kept_layer(self) -> torch.Tensor:
        """What layer 0 held, which nothing was about."""
        pool = self.past.clone()
        _tokens_of(pool)[self.nobodys] = torch.nan
        return pool[:, :, 0]


def _tokens_of(pool: torch.Tensor) -> torch.Tensor:
    """A pool as [block, offset, kv_head, layer, key or value, head_dim]."""
    return pool.permute(0, 4, 1, 2, 3, 5)


def make_batch(rows: list[tuple[int, int]], table: IntArray, block_size: int) -> Batch:
    sequence = cast(Sequence, SimpleNamespace())
    starts = itertools.accumulate((num_new for _, num_new in rows), initial=0)
    placed = tuple(
        BatchRow(sequence, start, computed, num_new, True)
        for start, (computed, num_new) in zip(starts, rows, strict=False)
    )
    owners = np.repeat(np.arange(len(rows)), [num_new for _, num_new in rows])
    positions = np.concatenate([np.arange(row.computed, row.total) for row in placed])
    return Batch(
        rows=placed,
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slots=table[owners, positions // block_size] * block_size + positions % block_size,
        block_table=table,
        computed=np.array([row.computed for row in placed]),
        num_decode=sum(num_new == 1 for _, num_new in rows),
        head_rows=None,
    )
