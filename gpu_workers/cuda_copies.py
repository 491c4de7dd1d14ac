"""What to copy where for a pull between two GPUs' pools: byte offsets and lengths.

Pure arithmetic on `kv_layout` pieces: no memory, no CUDA. Where both sides cut the layers alike, a
piece of a block is one run of bytes on either side, and runs that follow each other on both sides
are one copy. Where they do not, each head of the piece is a run of its own, equally far apart: a
copy of rows. Small copies are gathered into batches, since each call costs as much as some
hundred kilobytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ipc.kv_layout import Piece, RankLayout

BATCH_BELOW_BYTES = 256 << 10
"""Copies smaller than this go in batches where nobody could measure which is quicker."""


class Rows(NamedTuple):
    """Equally long runs of bytes, equally far apart on either side; `height` 1 is a single run."""

    source: int
    target: int
    width: int
    height: int = 1
    source_pitch: int = 0
    target_pitch: int = 0

    @property
    def num_bytes(self) -> int:
        return self.width * self.height

    @property
    def runs(self) -> Iterator["Run"]:
        for row in range(self.height):
            source = self.source + row * self.source_pitch
            yield Run(source, self.target + row * self.target_pitch, self.width)


class Run(NamedTuple):
    """So many bytes from there to here."""

    source: int
    target: int
    num_bytes: int


class CopyPlan(NamedTuple):
    """How to carry out a pull from one pool: in any order, all of them write elsewhere."""

    runs: tuple[Run, ...]
    batch: tuple[Run, ...]
    rows: tuple[Rows, ...]

    @property
    def num_bytes(self) -> int:
        parts = (self.runs, self.batch, self.rows)
        return sum(one.num_bytes for part in parts for one in part)


class Staged(NamedTuple):
    """A run that goes by way of a slot in between, and where in the slot it lies."""

    run: Run
    offset: int


def plan_copies(
    source: RankLayout,
    target: RankLayout,
    piece: Piece,
    blocks: Sequence[tuple[int, int]],
    *,
    batch_below: int = BATCH_BELOW_BYTES,
) -> CopyPlan:
    """The copies of one piece of every block.

    Args:
        source: the layout of the pool that is read, `target` of ours.
        piece: what to copy of each block, as `kv_layout.pieces` found it for the two.
        blocks: (source's block, our block) of each.
        batch_below: runs and rows of fewer bytes are gathered.
    """
    parts = merged(_part(source, target, piece, *pair) for pair in blocks)
    runs = tuple(run for part in parts if part.height == 1 for run in part.runs)
    tall = [part for part in parts if part.height > 1]
    large = tuple(run for run in runs if run.num_bytes >= batch_below)
    small = tuple(run for run in runs if run.num_bytes < batch_below)
    if len(small) <= 1:  # nothing to gather
        large, small = runs, ()
    return CopyPlan(large, small, tuple(tall))


def merged(parts: Iterable[Rows]) -> list[Rows]:
    """The same copies in fewer calls: what goes on where the part before ends, on both sides."""
    whole: list[Rows] = []
    for part in parts:
        joined = _joined(whole[-1], part) if whole else None
        if joined is None:
            whole.append(part)
        else:
            whole[-1] = joined
    return whole


def all_runs(plan: CopyPlan) -> Iterator[Run]:
    """Every run of a plan by itself."""
    yield from plan.runs
    yield from plan.batch
    for rows in plan.rows:
        yield from rows.runs


def staged(runs: Iterable[Run], slot_bytes: int, max_runs: int) -> Iterator[list[Staged]]:
    """Runs by way of slots of that size: one list, of so many at most, for each filling of one."""
    slot: list[Staged] = []
    used = 0
    for run in runs:
        done = 0
        while done < run.num_bytes:
            if used == slot_bytes or len(slot) == max_runs:
                yield slot
                slot, used = [], 0
            size = min(slot_bytes - used, run.num_bytes - done)
            slot.append(Staged(Run(run.source + done, run.target + done, size), used))
            done, used = done + size, used + size
    if slot:
        yield slot


def _part(
    source: RankLayout, target: RankLayout, piece: Piece, src_block: int, dst_block: int
) -> Rows:
    """One piece of one block."""
    plane = source.plane_bytes
    src_pitch, dst_pitch = source.layers.size * plane, target.layers.size * plane
    start = src_block * source.block_bytes + piece.src_head * src_pitch + piece.src_layer * plane
    into = dst_block * target.block_bytes + piece.dst_head * dst_pitch + piece.dst_layer * plane
    width = piece.num_layers * plane
    if piece.num_heads == 1 or width == src_pitch == dst_pitch:
        return Rows(start, into, width * piece.num_heads)
    return Rows(start, into, width, piece.num_heads, src_pitch, dst_pitch)


def _joined(first: Rows, second: Rows) -> Rows | None:
    """The two as one, if they can be."""
    if first.height == second.height == 1:
        if _distance(first, second) != (first.width, first.width):
            return None
        return first._replace(width=first.width + second.width)
    same = (second.width, second.source_pitch, second.target_pitch)
    if (first.width, first.source_pitch, first.target_pitch) != same:
        return None
    pitches = (first.source_pitch * first.height, first.target_pitch * first.height)
    if _distance(first, second) != pitches:
        return None
    return first._replace(height=first.height + second.height)


def _distance(first: Rows, second: Rows) -> tuple[int, int]:
    return second.source - first.source, second.target - first.target
