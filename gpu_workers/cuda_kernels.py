"""The arithmetic of a forward pass on a GPU: cuBLAS products, FlashInfer's paged attention.

Rotation, the writing of keys and values, and the gate are FlashInfer's kernels where they save
launches, norms are torch's; each can be switched to the other (DISTSERVE_FLASHINFER, or the
constructor), so that both can be measured and torch is always there to fall back on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gpu_workers.batch import Batch
from gpu_workers.cuda_attention import AttentionShape, PagedAttention, workspace_bytes
from gpu_workers.cuda_device import Device, send
from gpu_workers.cuda_linear import CudaLinear
from gpu_workers.cuda_step import HostStep, host_step, padding_only, prompt_only
from gpu_workers.cuda_switches import Switches
from gpu_workers.errors import ModelError
from gpu_workers.kernels import Geometry, Linear, Norm
from gpu_workers.models.config import Activation
from gpu_workers.scratch import Scratch

WIDE_PER_ROW = 4  # of a decode step: token id, position, block, offset
NARROW_PER_ROW = 4  # owner, position, indptr (and one more), last page's length
VECTOR = 8  # 16-bit elements that FlashInfer's kernels take at once
BLOCK_THREADS = 1024  # the most in one block on any GPU
WARM_UP_TOKENS = 96  # enough for the largest tiles of queries


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step's arrays on the device, as in `HostStep`, and who computes its attention."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    owners: torch.Tensor
    small_positions: torch.Tensor  # int32
    indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor
    attention: PagedAttention
    scratch: Scratch


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """Where captured graphs find the arrays of their steps: one place for all sizes of graphs,
    since one runs after the other.

    `wide` is int64; `narrow` is int32, with the pages last; the others are FlashInfer's own.
    `workspace` is uint8.
    """

    wide: torch.Tensor
    narrow: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    workspace: torch.Tensor

    def tables(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """FlashInfer's for that number of rows."""
        return self.indptr[: size + 1], self.indices, self.last_page_len[:size]

    def pages(self, size: int) -> torch.Tensor:
        """Where the pages of such a step begin, to the end: a step may have fewer of them than
        the next one that a graph runs."""
        return self.narrow[NARROW_PER_ROW * size + 1 :]


class CudaKernels:
    """`Kernels` for one worker on one GPU.

    Args:
        pool: the KV pool, [blocks, kv_heads, layers, 2, block_size, head_dim], with heads as wide
            as attention is compiled for; its element type is that of all activations. No sequence
            is ever given its last block, `spare_block`: rows of padding read and write there.
        geometry: query heads, scale and rotary table; a table of fewer elements than a head of the
            pool rotates the first ones, the rest is padding.
        flashinfer: the library.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        geometry: Geometry,
        device: Device,
        flashinfer: Any,
        switches: Switches | None = None,
    ) -> None:
        _, kv_heads, num_layers, _, block_size, head_dim = pool.shape
        self.device = device
        self.block_size, self.dtype = block_size, pool.dtype
        self.spare_block = len(pool) - 1
        self._flashinfer = flashinfer
        switches = switches or Switches()
        self._is_norm_fused, self._is_silu_fused = switches.norm, switches.silu
        # A token is one block of theirs, with a thread for each vector of each KV head.
        fits_block = head_dim // VECTOR * kv_heads <= BLOCK_THREADS
        self._is_append_fused = switches.append and fits_block
        self._num_heads, self._kv_heads, self._head_dim = geometry.num_heads, kv_heads, head_dim
        shape = (geometry.num_heads, kv_heads, head_dim, block_size, geometry.scale, pool.dtype)
        self._shape = AttentionShape(*shape)
        # The view of one layer is FlashInfer's HND layout; keys and values have equal strides.
        self._kv = [(pool[:, :, layer, 0], pool[:, :, layer, 1]) for layer in range(num_layers)]
        self._workspace = self._zeros(workspace_bytes(geometry.num_heads, kv_heads, head_dim))
        self._take_rope(geometry.rope, is_fused=switches.rope)
        scratch = Scratch(pool.dtype, device.torch_device)
        # While one's plan may still be on its way to the device, the other plans the next step.
        self._turns = [(self._attention(), scratch) for _ in range(2)]
        self._step: DeviceStep | None = None

    @property
    def name(self) -> str:
        return f"flashinfer-{self._flashinfer.__version__}"

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every kernel of the library's once, for a decode row and for a prompt, so that none
        is compiled or loaded while it is waited for: compiling takes minutes.

        Raises:
            ModelError: they cannot be compiled, or do not run here; says why.
        """
        try:
            self._run_each()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ModelError(f"{self.name}'s kernels do not run here: {error}") from error

    def _run_each(self) -> None:
        num_positions = WARM_UP_TOKENS if self._rope is None else len(self._rope)
        length = min(WARM_UP_TOKENS, num_positions)
        attention, scratch = self._turns[0]
        for host in (
            padding_only(1, self.spare_block),
            prompt_only(length, self.block_size, self.spare_block),
        ):
            self._run_all(self._place(host, attention, scratch, None))
        self.device.synchronize()

    def _run_all(self, step: DeviceStep) -> None:
        device = self.device.torch_device
        width = (self._num_heads + 2 * self._kv_heads) * self._head_dim
        qkv = torch.zeros(len(step.token_ids), width, dtype=self.dtype, device=device)
        with self.on(step):
            self.append(0, qkv)
            self.attention(0, qkv)
            self.silu_mul(qkv)
        norm = Norm(torch.ones(width, dtype=self.dtype, device=device), 1e-6)
        self.add_rms_norm(self.rms_norm(qkv, norm), qkv, norm)

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Linear:
        return CudaLinear(weight, bias, activation)

    def prepare(self, batch: Batch) -> None:
        self.load(batch)

    def load(self, batch: Batch) -> Batch:
        """Prepare a batch; the same with its tensors on the device."""
        step = host_step(batch, self.block_size)
        self._turns.reverse()
        attention, scratch = self._turns[0]
        placed = self._place(step, attention, scratch, None)
        self._step = placed
        head_rows = None if step.head_rows is None else send(self.device, [step.head_rows])[0]
        return replace(
            batch, token_ids=placed.token_ids, positions=placed.positions, head_rows=head_rows
        )

    def fixed_memory(self, max_rows: int, max_pages: int) -> FixedMemory:
        """For captured graphs of up to so many decode rows, with so many pages in all."""
        int32 = torch.int32
        shape = (self._num_heads, self._kv_heads, self._head_dim)
        num_bytes = workspace_bytes(*shape, graph_rows=max_rows)
        has_room = num_bytes <= len(self._workspace)
        return FixedMemory(
            wide=self._zeros(WIDE_PER_ROW * max_rows, torch.int64),
            narrow=self._zeros(NARROW_PER_ROW * max_rows + 1 + max_pages, int32),
            indptr=self._zeros(max_rows + 1, int32),
            indices=self._zeros(max_pages, int32),
            last_page_len=self._zeros(max_rows, int32),
            workspace=self._workspace if has_room else self._zeros(num_bytes),
        )

    def fixed_attention(self, memory: FixedMemory, size: int) -> PagedAttention:
        """For the graph of that many rows."""
        library, shape = self._flashinfer, self._shape
        return PagedAttention(library, self.device, shape, memory.workspace, memory.tables(size))

    def place_fixed(
        self, step: HostStep, memory: FixedMemory, attention: PagedAttention, scratch: Scratch
    ) -> DeviceStep:
        """Put a step's arrays where a graph reads them, and plan its attention."""
        return self._place(step, attention, scratch, memory)

    @contextmanager
    def on(self, step: DeviceStep) -> Iterator[None]:
        """Calls inside are about that step."""
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._is_norm_fused:
            normed: torch.Tensor = self._flashinfer.rmsnorm(x, norm.weight, eps=norm.eps)
            return normed
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._is_norm_fused:
            self._flashinfer.fused_add_rmsnorm(x, residual, norm.weight, eps=norm.eps)
            return x
        return self.rms_norm(residual.add_(x), norm)

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.layer_norm(residual.add_(x), norm)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = gate_up.shape[-1] // 2
        if self._is_silu_fused and width % VECTOR == 0:
            out = self._current.scratch.take("silu", len(gate_up), width)
            self._flashinfer.silu_and_mul(gate_up, out=out)
            return out
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        step = self._current
        heads = qkv.view(len(qkv), -1, self._head_dim)  # (T, heads + 2 kv_heads, D)
        if self._rope is not None:
            self._rotate(qkv, heads, step)
        keys, values = torch.split(heads[:, self._num_heads :], self._kv_heads, dim=1)
        if not self._is_append_fused:
            own_keys, own_values = self._kv[layer]
            own_keys[step.blocks, :, step.offsets] = keys
            own_values[step.blocks, :, step.offsets] = values
            return
        self._flashinfer.append_paged_kv_cache(
            keys,
            values,
            step.owners,
            step.small_positions,
            self._kv[layer],
            step.indices,
            step.indptr,
            step.last_page_len,
            kv_layout="HND",
        )

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        step = self._current
        q = qkv.view(len(qkv), -1, self._head_dim)[:, : self._num_heads]
        out = step.scratch.take("attention", len(qkv), self._num_heads, self._head_dim)
        step.attention.run(q, self._kv[layer], out)
        return out.view(len(qkv), -1)

    @property
    def _current(self) -> DeviceStep:
        assert self._step is not None, "no step is prepared"
        return self._step

    def _attention(self) -> PagedAttention:
        return PagedAttention(self._flashinfer, self.device, self._shape, self._workspace)

    def _zeros(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device.torch_device)

    def _take_rope(self, table: torch.Tensor | None, *, is_fused: bool) -> None:
        self._rope = None
        if table is not None:
            # (positions, cosines | sines), as both ways of rotating take it
            self._rope = table.reshape(len(table), -1).to(self.device.torch_device)
            half = self._rope.shape[1] // 2
            # One half of a head is rotated by the other, in whole vectors.
            self._is_rope_fused = is_fused and half % VECTOR == 0

    def _rotate(self, qkv: torch.Tensor, heads: torch.Tensor, step: DeviceStep) -> None:
        assert self._rope is not None, "positions are learned"
        if self._is_rope_fused:
            q_width, kv_width = (n * self._head_dim for n in (self._num_heads, self._kv_heads))
            self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
                step.small_positions,
                qkv[:, :q_width],
                qkv[:, q_width : q_width + kv_width],
                self._head_dim,
                self._rope,
                is_neox=True,
            )
            return
        width = self._rope.shape[1]
        turned = heads[:, : self._num_heads + self._kv_heads, :width]
        cos, sin = self._rope.index_select(0, step.positions)[:, None].chunk(2, dim=-1)
        x1, x2 = turned.float().chunk(2, dim=-1)
        turned.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))

    def _place(
        self,
        step: HostStep,
        attention: PagedAttention,
        scratch: Scratch,
        memory: FixedMemory | None,
    ) -> DeviceStep:
        wide = [step.token_ids, step.positions, step.blocks, step.offsets]
        small_positions = step.positions.astype(np.int32)
        pages = step.pages
        narrow = [step.owners, small_positions, pages.indptr, pages.last_page_len, pages.indices]
        into = (memory.wide, memory.narrow) if memory else (None, None)
        token_ids, positions, blocks, offsets = send(self.device, wide, into[0])
        owners, small, indptr, last, indices = send(self.device, narrow, into[1])
        attention.plan(step, indices)
        if memory is not None:
            indices = memory.pages(len(token_ids))
        return DeviceStep(
            token_ids=token_ids,
            positions=positions,
            blocks=blocks,
            offsets=offsets,
            owners=owners,
            small_positions=small,
            indptr=indptr,
            last_page_len=last,
            indices=indices,
            attention=attention,
            scratch=scratch,
        )
