"""Attention on CPU in plain torch: the fallback without compiled kernels, and their reference.

Products of queries and keys are kept in fp32, as fused kernels do: rounding them to 16 bit would
cost more accuracy than everything around them. Probabilities meet the values in 16 bit.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_workers.batch import Batch
from gpu_workers.scratch import Scratch
from gpu_workers.sequence_table import IntArray

QUERY_TILE = 64  # queries of a prompt that share one block of scores
GROUP_ELEMENTS = 1 << 20  # keys gathered at once for decode rows: stays near the cache


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length that are computed together: rows `start : stop`.

    planes: int64 (rows * kv_heads * width,), the key planes of layer 0, in gathering order.
    mask: fp32 (rows, 1, width * block_size), 0 where a row has a token, -inf past its end.
    """

    start: int
    stop: int
    planes: IntArray
    mask: torch.Tensor


class PagedKV:
    """Reads and writes one layer's keys and values through a pool seen as rows and planes.

    A plane is the keys (or values) of one block, head and layer: block_size * head_dim elements
    in one run. As planes of all layers lie at the same distance from those of layer 0, the same
    indices serve every layer of a view that starts later. Copies go through numpy, whose `take`
    moves whole runs; elements are opaque bytes there.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        _, self.kv_heads, self.num_layers, _, self.block_size, self.head_dim = pool.shape
        raw = pool.view(torch.uint8).numpy().reshape(-1)
        row_bytes = self.head_dim * pool.element_size()
        self._row = np.dtype((np.void, row_bytes))
        self._plane = np.dtype((np.void, row_bytes * self.block_size))
        self._rows = raw.view(self._row)
        self._planes = raw.view(self._plane)

    def row_indices(self, slots: IntArray) -> IntArray:
        """Rows of layer 0 for tokens at `slots` (T,): (T, 2 * kv_heads), keys then values."""
        heads = self._planes_of(slots // self.block_size)  # (T, kv_heads)
        both = np.concatenate((heads, heads + 1), axis=1)
        rows: IntArray = both * self.block_size + (slots % self.block_size)[:, None]
        return rows

    def plane_indices(self, block_table: IntArray) -> IntArray:
        """Key planes of layer 0 for blocks (R, W), head before block: (R * kv_heads * W,)."""
        return self._planes_of(block_table).swapaxes(-1, -2).reshape(-1)

    def write(self, layer: int, rows: IntArray, kv: torch.Tensor) -> None:
        """Store kv (T, 2 * kv_heads, head_dim) at the rows that `row_indices` named."""
        shifted = self._rows[layer * 2 * self.block_size :]
        shifted[rows] = _opaque(kv, self._row)[..., 0]

    def gather(
        self, layer: int, planes: IntArray, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Copy the named planes' keys and values into two contiguous tensors."""
        source = self._planes[2 * layer :]
        np.take(source, planes, out=_opaque(keys.view(-1), self._plane), mode="clip")
        np.take(source[1:], planes, out=_opaque(values.view(-1), self._plane), mode="clip")

    def _planes_of(self, blocks: IntArray) -> IntArray:
        """Key planes of layer 0: the blocks' shape with an axis of kv_heads appended."""
        heads = np.arange(self.kv_heads)
        planes: IntArray = (blocks[..., None] * self.kv_heads + heads) * (2 * self.num_layers)
        return planes


def group_decode_rows(batch: Batch, kv: PagedKV) -> list[DecodeGroup]:
    """Cut the batch's decode rows, which come sorted by length, into groups for the cache."""
    groups, start = [], 0
    blocks = batch.computed[: batch.num_decode] // kv.block_size + 1  # the new token included
    for stop in range(1, batch.num_decode + 1):
        is_last = stop == batch.num_decode
        if is_last or _elements(int(blocks[stop]), stop + 1 - start, kv) > GROUP_ELEMENTS:
            groups.append(_group(batch, kv, start, stop, int(blocks[stop - 1])))
            start = stop
    return groups


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor,
    scratch: Scratch,
) -> torch.Tensor:
    """One query position per row over gathered pages.

    Args:
        q: fp32 (B, kv_heads, group, D), scaled.
        keys, values: (B, kv_heads, S, D).
        mask: fp32 (B, 1, S), added to the scores.

    Returns:
        (B * kv_heads, group, D)
    """
    rows, kv_heads, group, head_dim = q.shape
    length = keys.shape[2]
    scores = scratch.take("scores", rows * kv_heads, group, length, dtype=torch.float32)
    full_keys = _as_float(keys.view(rows * kv_heads, length, head_dim), "keys32", scratch)
    torch.bmm(q.view(-1, group, head_dim), full_keys.transpose(1, 2), out=scores)
    scores.view(rows, kv_heads * group, length).add_(mask)
    weights = _softmax(scores, values.dtype, scratch)
    return torch.bmm(weights, values.view(rows * kv_heads, length, head_dim))


def causal_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """The last N of S positions attend to all positions up to their own, by tiles of queries.

    Args:
        q: fp32 (N, kv_heads, group, D), scaled.
        keys, values: (kv_heads, S, D), S >= N; any strides.
        out: (N, kv_heads, group, D), written.
    """
    num_new, kv_heads, group, head_dim = q.shape
    past = keys.shape[1] - num_new
    grouped = q.permute(1, 2, 0, 3)  # (kv_heads, group, N, D)
    full_keys = keys.transpose(1, 2).float()  # (kv_heads, D, S)
    values = values.contiguous()
    ahead = torch.full((QUERY_TILE, QUERY_TILE), -torch.inf).triu_(1)
    for start in range(0, num_new, QUERY_TILE):
        size = min(QUERY_TILE, num_new - start)
        stop = past + start + size
        tile = grouped[:, :, start : start + size].reshape(kv_heads, group * size, head_dim)
        scores = scratch.take("scores", kv_heads, group * size, stop, dtype=torch.float32)
        torch.bmm(tile, full_keys[:, :, :stop], out=scores)
        scores.view(kv_heads, group, size, stop)[..., stop - size :].add_(ahead[:size, :size])
        mixed = torch.bmm(_softmax(scores, values.dtype, scratch), values[:, :stop])
        tile_out = mixed.view(kv_heads, group, size, head_dim)
        out[start : start + size].copy_(tile_out.permute(2, 0, 1, 3))


def _opaque(x: torch.Tensor, item: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The same memory as items of bytes: the last axis, one run, is cut into whole items."""
    return x.view(torch.uint8).numpy().view(item)


def _softmax(scores: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    torch.softmax(scores, -1, out=scores)
    if dtype == torch.float32:
        return scores
    return scratch.take("weights", *scores.shape).copy_(scores)


def _as_float(x: torch.Tensor, name: str, scratch: Scratch) -> torch.Tensor:
    if x.dtype == torch.float32:
        return x
    return scratch.take(name, *x.shape, dtype=torch.float32).copy_(x)


def _elements(width: int, rows: int, kv: PagedKV) -> int:
    return rows * width * kv.kv_heads * kv.block_size * kv.head_dim


def _group(batch: Batch, kv: PagedKV, start: int, stop: int, width: int) -> DecodeGroup:
    positions = np.arange(width * kv.block_size)
    beyond = positions > batch.computed[start:stop, None]  # (rows, S)
    mask = torch.from_numpy(np.where(beyond, np.float32(-np.inf), np.float32(0)))[:, None]
    blocks = batch.block_table[start:stop, :width].copy()
    # Past a row's end its first block is gathered again: finite numbers with a weight of zero.
    past_end = np.arange(width) > batch.computed[start:stop, None] // kv.block_size
    np.copyto(blocks, blocks[:, :1], where=past_end)
    return DecodeGroup(start, stop, kv.plane_indices(blocks), mask)
