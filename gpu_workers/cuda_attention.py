"""Paged attention by FlashInfer: planned once a step for all layers, then run for each.

Decode rows and longer rows (prompts, chunks) are two kernels' work, in one batch. Both are the FA2
kernels, decode with tensor cores: one module per element type and head width serves both, and any
ratio of query heads to KV heads.

A wrapper plans in pinned memory of its own, from which a copy runs by itself: it must not plan
again before the device has come past that copy.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from gpu_workers.cuda_device import Device
from gpu_workers.cuda_step import HostStep, PageTable
from gpu_workers.errors import ModelError

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation, which is not always enough
WRAPPER_BYTES = 8 << 20  # each wrapper's own workspace for its plan, on the device and pinned
GRAPH_PLAN_BYTES = 1 << 20  # the same for a graph's: a plan has some 30 bytes for each of its rows
MOST_MULTIPROCESSORS = 192  # of any GPU that there is
HEAD_DIMS = (64, 128, 256)  # what FA2 is compiled for; others are padded

LAYOUT = "HND"
BACKEND = "fa2"  # FA3 takes minutes to compile


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`head_dim` is the pool's; `scale` belongs to the model's own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype


def load_flashinfer() -> Any:
    """The library, imported only where a GPU computes.

    Raises:
        ModelError: it is not installed.
    """
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ModelError(
            f"FlashInfer cannot be imported ({error}); on GPUs it is needed: pip install '.[cuda]'"
        ) from error


def stored_head_dim(head_dim: int) -> int:
    """The width of a head in the pool: the next one that attention is compiled for.

    Raises:
        ModelError: there is none.
    """
    wide_enough = [width for width in HEAD_DIMS if width >= head_dim]
    if not wide_enough:
        raise ModelError(f"a head width of {head_dim} is above {HEAD_DIMS[-1]}: not on GPUs")
    return wide_enough[0]


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, graph_rows: int = 0) -> int:
    """What partial results of divided sequences take: those of eager steps, or those of captured
    ones of up to so many rows.

    Source: PrefillPlan in FlashInfer's scheduler.cuh. A batch is divided into at most two pieces
    for each multiprocessor, over the KV heads; a captured step has room for as many, or for all
    tiles of queries that its rows can have, whichever is more. Each piece is a tile of fp32 values
    with a weight for every head; since 0.7, for every KV head.
    """
    group = num_heads // num_kv_heads
    pieces, tile = 2 * MOST_MULTIPROCESSORS // num_kv_heads, _tile(None, head_dim)
    if graph_rows:
        tile = _tile(group, head_dim)
        pieces = max(pieces, -(-graph_rows * group // tile) + graph_rows - 1)
    return max(WORKSPACE_BYTES, num_heads * pieces * tile * (head_dim + 1) * 4)


def _tile(num_queries: int | None, head_dim: int) -> int:
    """Queries that are computed together, where each row has so many; None is any number."""
    if num_queries is not None and num_queries <= 64:
        return 16 if num_queries <= 16 else 64
    return 128 if head_dim < 256 else 64


class PagedAttention:
    """Attention of the steps of one place in turn, each step planned before it is run.

    Args:
        flashinfer: the library, or what has its face.
        workspace: uint8, shared by all wrappers of the stream.
        fixed: where page tables lie when the step is a captured graph's: (indptr, indices,
            last_page_len) for its number of rows.
    """

    def __init__(
        self,
        flashinfer: Any,
        device: Device,
        shape: AttentionShape,
        workspace: torch.Tensor,
        fixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._shape = shape
        self._planned = device.event()
        indptr, indices, last_page_len = fixed or (None, None, None)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout=LAYOUT,
            use_cuda_graph=fixed is not None,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
            backend=BACKEND,
        )
        self._prefill = None
        if fixed is not None:
            plan = torch.empty(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=device.torch_device)
            self._decode.reset_workspace_buffer(workspace, plan)
        else:
            self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, kv_layout=LAYOUT, backend=BACKEND
            )
        self._num_decode = 0
        self._num_tokens = 0

    def plan(self, step: HostStep, indices: torch.Tensor) -> None:
        """What follows is about this step.

        Args:
            indices: the step's pages on the device, int32.
        """
        self._planned.synchronize()
        num_decode, num_rows = step.num_decode, step.pages.num_rows
        self._num_decode, self._num_tokens = num_decode, len(step.token_ids)
        split = int(step.pages.indptr[num_decode])
        if num_decode:
            self._plan_decode(step.pages.rows(0, num_decode), indices[:split])
        if num_decode < num_rows:
            starts = torch.from_numpy(step.row_starts[num_decode:] - num_decode)
            self._plan_prefill(step.pages.rows(num_decode, num_rows), indices[split:], starts)
        self._planned.record()

    def run(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """Attention of all rows of the planned step.

        Args:
            q: (T, heads, head_dim).
            kv: keys and values of a layer, (blocks, kv_heads, block_size, head_dim) each, of equal
                strides.
            out: (T, heads, head_dim), written.
        """
        num_decode = self._num_decode
        if num_decode:
            self._decode.run(q[:num_decode], kv, out=out[:num_decode])
        if self._prefill is not None and num_decode < self._num_tokens:
            self._prefill.run(q[num_decode:], kv, out=out[num_decode:])

    def _plan_decode(self, pages: PageTable, indices: torch.Tensor) -> None:
        shape = self._shape
        self._decode.plan(
            torch.from_numpy(pages.indptr),
            indices,
            torch.from_numpy(pages.last_page_len),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.block_size,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def _plan_prefill(
        self, pages: PageTable, indices: torch.Tensor, row_starts: torch.Tensor
    ) -> None:
        assert self._prefill is not None, "graphs are of decode rows alone"
        shape = self._shape
        self._prefill.plan(
            row_starts,
            torch.from_numpy(pages.indptr),
            indices,
            torch.from_numpy(pages.last_page_len),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=shape.block_size,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
