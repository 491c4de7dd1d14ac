"""The arithmetic of a forward pass on CPU by compiled kernels; linears share it with oneDNN.

Every result goes into a buffer that is allocated once. What a batch is, C reads from one struct
that `prepare` fills, so a call costs about a microsecond of Python.
"""

import ctypes
import math

import numpy as np
import torch
import torch.nn.functional as F

from gpu_workers.batch import Batch, BatchRow
from gpu_workers.cpu_linear import DenseLinear, PackedLinear, can_pack
from gpu_workers.kernels import Geometry, Linear, Norm
from gpu_workers.models.config import Activation
from gpu_workers.native_build import NativeLibrary
from gpu_workers.native_calls import ELEMENT_TYPES, Calls, NormArguments, Outputs, Step
from gpu_workers.native_linear import PanelLinear, has_matrix_unit
from gpu_workers.scratch import Scratch, keep_freed_memory

HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256  # these three as in kernels.c
BLOCK_ROWS = 48
COLUMNS = 64


def can_compute(pool: torch.Tensor, num_heads: int) -> bool:
    """Whether the compiled kernels know the pool's element type and the model's head sizes."""
    kv_heads, head_dim = pool.shape[1], pool.shape[-1]
    return (
        pool.dtype in ELEMENT_TYPES
        and head_dim % HEAD_DIM_MULTIPLE == 0
        and head_dim <= MAX_HEAD_DIM
        and num_heads // kv_heads <= BLOCK_ROWS
    )


class NativeKernels:
    """`Kernels` for one worker on CPU cores with AVX2 or better.

    Args:
        library: the compiled kernels.
        pool: the KV pool, [blocks, kv_heads, layers, 2, block_size, head_dim], bf16 or fp32; its
            element type is that of all activations. `can_compute` must hold.
        geometry: query heads, scale and rotary table.
    """

    def __init__(self, library: NativeLibrary, pool: torch.Tensor, geometry: Geometry) -> None:
        keep_freed_memory()
        self._calls = Calls(library)
        self._pool = pool
        self._rope = None if geometry.rope is None else geometry.rope.contiguous()
        self._type = ELEMENT_TYPES[pool.dtype]
        self._outputs = Outputs(pool.dtype)
        self._panels = Scratch(torch.int32)
        self._norms: dict[int, tuple[Norm, NormArguments, int]] = {}
        self._rows: tuple[BatchRow, ...] = ()
        self._has_matrix_unit = self._type == ELEMENT_TYPES[torch.bfloat16] and has_matrix_unit()
        _, kv_heads, num_layers, _, block_size, head_dim = pool.shape
        self._width = geometry.num_heads * head_dim
        self._query_block = BLOCK_ROWS // (geometry.num_heads // kv_heads)
        self._tile_units = 2 * COLUMNS * head_dim * pool.element_size() // 4
        self._step = Step(
            pool=pool.data_ptr(),
            rope=None if self._rope is None else self._rope.data_ptr(),
            num_heads=geometry.num_heads,
            kv_heads=kv_heads,
            num_layers=num_layers,
            block_size=block_size,
            head_dim=head_dim,
            scale=geometry.scale,
            type=self._type,
        )
        self._step_address = ctypes.addressof(self._step)

    @property
    def name(self) -> str:
        return f"native-{self._calls.isa.name}"

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Linear:
        if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
            return PanelLinear(self._calls, self._outputs, weight, bias, activation)
        kind = PackedLinear if can_pack(weight.dtype) else DenseLinear
        return kind(weight, bias, activation)

    def prepare(self, batch: Batch) -> None:
        self._batch = batch  # whose memory the struct points into
        self._table = np.ascontiguousarray(batch.block_table)
        self._rows = batch.rows[batch.num_decode :]
        step = self._step
        step.positions = batch.positions.data_ptr()
        step.slots = batch.slots.ctypes.data
        step.computed = batch.computed.ctypes.data
        step.block_table = self._table.ctypes.data
        step.table_width = self._table.shape[1]
        step.num_tokens = batch.num_tokens
        step.num_decode = batch.num_decode
        step.panels = self._panels.take("panels", self._panel_units()).data_ptr()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._norm(x, None, norm, centred=False)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._norm(x, residual, norm, centred=False)

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._norm(x, None, norm, centred=True)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._norm(x, residual, norm, centred=True)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, address = self._outputs.take("silu", rows, width)
        self._calls.silu_mul(gate_up.data_ptr(), address, rows, width, self._type)
        return out

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        assert qkv.is_contiguous()
        self._calls.append(self._step_address, layer, qkv.data_ptr())

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        out, address = self._outputs.take("attention", qkv.shape[0], self._width)
        self._calls.decode_attention(self._step_address, layer, qkv.data_ptr(), address)
        for index, row in enumerate(self._rows, self._batch.num_decode):
            new = slice(row.start, row.start + row.num_new)
            if self._has_matrix_unit and row.computed == 0 and row.num_new > self._query_block:
                self._attend_fresh(qkv[new], out[new])
            else:
                self._attend_pages(layer, index, qkv[new], out[new])
        return out

    def _attend_pages(self, layer: int, row: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        step = self._step_address
        self._calls.attention(step, layer, row, qkv.data_ptr(), out.data_ptr(), len(qkv))

    def _attend_fresh(self, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """A prompt without a past by torch's fused attention, which knows the matrix unit."""
        num_heads, kv_heads = self._step.num_heads, self._step.kv_heads
        heads = qkv.view(1, len(qkv), -1, self._step.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._step.scale, enable_gqa=True
        )
        out.view(len(qkv), num_heads, -1).copy_(mixed[0].transpose(0, 1))

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, *, centred: bool
    ) -> torch.Tensor:
        found = self._norms.get(id(norm))
        _, arguments, address = found or self._remember(norm, centred)
        x = x.contiguous()
        rows = x.shape[0]
        out, to = self._outputs.take("norm", rows, arguments.width)
        added = None
        if residual is not None:
            assert residual.is_contiguous()
            added = residual.data_ptr()
        self._calls.apply_norm(address, x.data_ptr(), added, to, rows)
        return out

    def _remember(self, norm: Norm, centred: bool) -> tuple[Norm, NormArguments, int]:
        """The norm's struct and its address; held with the norm, so that its id stays its own."""
        arguments = NormArguments(
            weight=norm.weight.data_ptr(),
            bias=None if norm.bias is None else norm.bias.data_ptr(),
            width=len(norm.weight),
            eps=norm.eps,
            centred=centred,
            type=self._type,
        )
        found = norm, arguments, ctypes.addressof(arguments)
        self._norms[id(norm)] = found
        return found

    def _panel_units(self) -> int:
        """Room for the packed keys and values of one head: of all tokens for longer rows."""
        long = (row.total for row in self._rows if row.num_new > self._query_block)
        return self._tile_units * max(1, math.ceil(max(long, default=0) / COLUMNS))
