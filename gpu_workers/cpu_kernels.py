"""The arithmetic of a forward pass on CPU, in torch alone.

What a compiled kernel set is tested against, and what serves where none can be built.
"""

import torch
import torch.nn.functional as F

from gpu_workers.batch import Batch, BatchRow
from gpu_workers.cpu_attention import (
    DecodeGroup,
    PagedKV,
    causal_attention,
    decode_attention,
    group_decode_rows,
)
from gpu_workers.cpu_linear import DenseLinear, PackedLinear, can_pack
from gpu_workers.kernels import Geometry, Linear, Norm
from gpu_workers.models.config import Activation
from gpu_workers.scratch import Scratch, keep_freed_memory
from gpu_workers.sequence_table import IntArray


class CpuKernels:
    """`Kernels` for one worker on CPU cores.

    Args:
        pool: the KV pool, [blocks, kv_heads, layers, 2, block_size, head_dim]; its element type
            is that of all activations.
        geometry: query heads, scale and rotary table.
        packed: False keeps plain weights, as a reference.
    """

    def __init__(self, pool: torch.Tensor, geometry: Geometry, *, packed: bool = True) -> None:
        keep_freed_memory()
        self._kv = PagedKV(pool)
        self._geometry = geometry
        self._packed = packed and can_pack(pool.dtype)
        self._scratch = Scratch(pool.dtype)
        self._rope = None if geometry.rope is None else geometry.rope.to(pool.dtype)
        self._rows: tuple[BatchRow, ...] = ()
        self._groups: list[DecodeGroup] = []
        self._past: list[IntArray] = []

    @property
    def name(self) -> str:
        return "torch-mkldnn" if self._packed else "torch"

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Linear:
        kind = PackedLinear if self._packed else DenseLinear
        return kind(weight, bias, activation)

    def prepare(self, batch: Batch) -> None:
        kv = self._kv
        self._rows = batch.rows[batch.num_decode :]
        self._groups = group_decode_rows(batch, kv)
        self._written = kv.row_indices(batch.slots)
        self._past = [
            kv.plane_indices(batch.block_table[index, : -(-row.total // kv.block_size)])
            for index, row in enumerate(self._rows, batch.num_decode)
        ]
        if self._rope is not None:
            angles = self._rope.index_select(0, batch.positions)  # (T, 2, D / 2)
            self._cos, self._sin = angles[:, None, None, 0], angles[:, None, 1]

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), norm)

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.layer_norm(residual.add_(x), norm)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        out = self._scratch.take("silu", *gate.shape)
        torch.ops.aten.silu.out(gate, out=out)
        return out.mul_(up)

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        heads = qkv.view(len(qkv), -1, self._kv.head_dim)  # (T, heads + 2 kv_heads, D)
        num_heads, kv_heads = self._geometry.num_heads, self._kv.kv_heads
        if self._rope is not None:
            self._rotate(heads[:, : num_heads + kv_heads])
        self._kv.write(layer, self._written, heads[:, num_heads:])

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        kv_heads, head_dim = self._kv.kv_heads, self._kv.head_dim
        group = self._geometry.num_heads // kv_heads
        heads = qkv.view(len(qkv), -1, head_dim)
        q = self._scratch.take("q32", len(qkv), kv_heads, group, head_dim, dtype=torch.float32)
        torch.mul(heads[:, : kv_heads * group].view_as(q), self._geometry.scale, out=q)
        out = self._scratch.take("attention", len(qkv), kv_heads, group, head_dim)
        for rows in self._groups:
            self._decode(layer, rows, q, out)
        for row, planes in zip(self._rows, self._past, strict=True):
            tokens = slice(row.start, row.start + row.num_new)
            keys, values = self._row_kv(layer, row, planes, heads[tokens])
            causal_attention(q[tokens], keys, values, out=out[tokens], scratch=self._scratch)
        return out.view(len(qkv), -1)

    def _rotate(self, heads: torch.Tensor) -> None:
        """(T, H, D) in place: pairs (x1, x2) of its halves by their position's angles."""
        halves = heads.view(*heads.shape[:2], 2, -1)
        x1, x2 = halves.unbind(2)
        turned = self._scratch.take("rotated", *halves.shape)
        torch.mul(halves, self._cos, out=turned)
        turned[:, :, 0].addcmul_(x2, self._sin, value=-1)
        turned[:, :, 1].addcmul_(x1, self._sin)
        halves.copy_(turned)

    def _decode(self, layer: int, rows: DecodeGroup, q: torch.Tensor, out: torch.Tensor) -> None:
        size = rows.stop - rows.start
        shape = (size, self._kv.kv_heads, rows.mask.shape[-1], self._kv.head_dim)
        keys, values = self._gather(layer, rows.planes, shape)
        queries = q[rows.start : rows.stop]
        mixed = decode_attention(queries, keys, values, mask=rows.mask, scratch=self._scratch)
        out[rows.start : rows.stop].copy_(mixed.view(size, *out.shape[1:]))

    def _row_kv(
        self, layer: int, row: BatchRow, planes: IntArray, heads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one row, (kv_heads, total, D): fresh ones, or gathered pages."""
        num_heads, kv_heads = self._geometry.num_heads, self._kv.kv_heads
        if row.computed == 0:
            fresh = heads[:, num_heads:].transpose(0, 1)
            return fresh[:kv_heads], fresh[kv_heads:]
        shape = (kv_heads, len(planes) // kv_heads * self._kv.block_size, self._kv.head_dim)
        keys, values = self._gather(layer, planes, shape)
        return keys[:, : row.total], values[:, : row.total]

    def _gather(
        self, layer: int, planes: IntArray, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._scratch.take("keys", *shape)
        values = self._scratch.take("values", *shape)
        self._kv.gather(layer, planes, keys, values)
        return keys, values
