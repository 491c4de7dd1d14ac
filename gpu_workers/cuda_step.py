"""The index arrays of one step on a GPU, made on the host.

Pure arithmetic over a batch: where each token's keys and values go, and which pages each row reads
in the compressed form that paged attention takes. A step of decode rows alone can be padded to a
size for which a graph was captured: padding rows read and write one page that no sequence has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_workers.batch import Batch
from gpu_workers.sequence_table import IntArray

Int32Array = npt.NDArray[np.int32]
_A = TypeVar("_A", bound=npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows' pages after this step: row r has `indices[indptr[r] : indptr[r + 1]]`, of which the
    last holds `last_page_len[r]` tokens (1 to the page size)."""

    indptr: Int32Array  # (R + 1,)
    indices: Int32Array
    last_page_len: Int32Array  # (R,)

    @property
    def num_rows(self) -> int:
        return len(self.last_page_len)

    def rows(self, start: int, stop: int) -> "PageTable":
        """Those rows alone."""
        first, last = self.indptr[start], self.indptr[stop]
        indptr = self.indptr[start : stop + 1] - first
        return PageTable(indptr, self.indices[first:last], self.last_page_len[start:stop])


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step's arrays; T tokens, R rows, decode rows first.

    token_ids, positions, blocks, offsets: int64 (T,); the last two say where keys and values go.
    owners: int32 (T,), the row of each token.
    row_starts: int32 (R + 1,), each row's first token.
    unseen, lines: int64 (U,), tokens whose ids only the device has, and at which lines.
    head_rows: int64 (N,), or None for all T.
    """

    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    offsets: IntArray
    owners: Int32Array
    row_starts: Int32Array
    pages: PageTable
    unseen: IntArray
    lines: IntArray
    head_rows: IntArray | None
    num_decode: int


def host_step(batch: Batch, block_size: int) -> HostStep:
    """What the device must know of a batch."""
    num_new = np.array([row.num_new for row in batch.rows], dtype=np.int32)
    totals = batch.computed + num_new
    unseen, lines = unseen_tokens(batch)
    return HostStep(
        token_ids=batch.token_ids.numpy(),
        positions=batch.positions.numpy(),
        blocks=batch.slots // block_size,
        offsets=batch.slots % block_size,
        owners=np.repeat(np.arange(len(num_new), dtype=np.int32), num_new),
        row_starts=_starts(num_new),
        pages=page_table(batch.block_table, totals, block_size),
        unseen=unseen,
        lines=lines,
        head_rows=None if batch.head_rows is None else batch.head_rows.numpy(),
        num_decode=batch.num_decode,
    )


def unseen_tokens(batch: Batch) -> tuple[IntArray, IntArray]:
    """Tokens of T whose ids only the device has, and the lines of the table where it has them."""
    rows = [row for row in batch.rows if row.ends_unseen]
    places = int64_array([row.start + row.num_new - 1 for row in rows])
    return places, int64_array([row.sequence.line for row in rows])


def int64_array(numbers: Sequence[int]) -> IntArray:
    return np.array(numbers, dtype=np.int64)


def page_table(block_table: IntArray, totals: IntArray, block_size: int) -> PageTable:
    """Of rows with `totals` tokens (R,) whose blocks stand in lines of `block_table` (R, W)."""
    counts = -(-totals // block_size)
    is_used = np.arange(block_table.shape[1]) < counts[:, None]
    return PageTable(
        indptr=_starts(counts),
        indices=block_table[is_used].astype(np.int32),
        last_page_len=(totals - (counts - 1) * block_size).astype(np.int32),
    )


def padded(step: HostStep, size: int, spare_block: int) -> HostStep:
    """A step of decode rows alone, with rows of one token in the spare block up to `size`."""
    num_rows = step.pages.num_rows
    assert step.num_decode == num_rows <= size, "only decode rows are padded"
    extra = size - num_rows
    spare = np.full(extra, spare_block)
    pages = PageTable(
        indptr=_extended(step.pages.indptr, step.pages.indptr[-1] + np.arange(1, extra + 1)),
        indices=_extended(step.pages.indices, spare),
        last_page_len=_extended(step.pages.last_page_len, np.ones(extra)),
    )
    nothing = np.zeros(extra)
    return HostStep(
        token_ids=_extended(step.token_ids, nothing),
        positions=_extended(step.positions, nothing),
        blocks=_extended(step.blocks, spare),
        offsets=_extended(step.offsets, nothing),
        owners=np.arange(size, dtype=np.int32),
        row_starts=np.arange(size + 1, dtype=np.int32),
        pages=pages,
        unseen=step.unseen,
        lines=step.lines,
        head_rows=None,
        num_decode=size,
    )


def padding_only(size: int, spare_block: int) -> HostStep:
    """A step without any sequence, to capture a graph with."""
    none, zero = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int32)
    short = np.zeros(0, dtype=np.int32)
    empty = HostStep(
        token_ids=none,
        positions=none,
        blocks=none,
        offsets=none,
        owners=short,
        row_starts=zero,
        pages=PageTable(zero, short, short),
        unseen=none,
        lines=none,
        head_rows=None,
        num_decode=0,
    )
    return padded(empty, size, spare_block)


def prompt_only(num_tokens: int, block_size: int, spare_block: int) -> HostStep:
    """A prompt that no sequence has, all of whose pages are one, to run kernels with."""
    places = np.arange(num_tokens)
    spare = np.full(num_tokens, spare_block)
    return HostStep(
        token_ids=np.zeros_like(places),
        positions=places,
        blocks=spare,
        offsets=places % block_size,
        owners=np.zeros(num_tokens, dtype=np.int32),
        row_starts=_starts(np.array([num_tokens])),
        pages=page_table(spare[None], np.array([num_tokens]), block_size),
        unseen=int64_array(()),
        lines=int64_array(()),
        head_rows=None,
        num_decode=0,
    )


def _starts(counts: npt.NDArray[Any]) -> Int32Array:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _extended(array: _A, more: npt.NDArray[Any]) -> _A:
    longer: _A = np.concatenate((array, more.astype(array.dtype)))  # type: ignore[assignment]
    return longer
