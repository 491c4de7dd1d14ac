"""What FlashInfer's planner asks for: room for the partial results of a batch that it divides.

The arithmetic of PrefillPlan (scheduler.cuh of 0.6.13, whose demands are the larger ones) for an
H200, in Python: how queries are tiled, into pieces of how many pages sequences are divided to keep
the device busy, and how many there are of them at most where the step is captured.
"""

from typing import Any, NamedTuple

MULTIPROCESSORS = 132
PIECES_PER_MULTIPROCESSOR = 2
LEAST_CHUNK_TOKENS = 128
FP32_BYTES = 4


class Heads(NamedTuple):
    """Of one rank; `dim` is the pool's."""

    queries: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.queries // self.kv


def partial_bytes(
    num_new: list[int], num_pages: list[int], heads: Heads, page_size: int, *, is_captured: bool
) -> int:
    """Of a batch whose rows have so many new tokens and so many pages; 0 if it is not divided."""
    packed = [n * heads.group for n in num_new]
    longest = sum(num_new) - len(num_new) + 1  # all that a row of a captured step may ever have
    typical = longest * heads.group if is_captured else sum(packed) // len(packed)
    tile = _tile(typical, heads.dim)
    most = PIECES_PER_MULTIPROCESSOR * MULTIPROCESSORS // heads.kv
    rows = [(_ceil_div(n, tile), pages) for n, pages in zip(packed, num_pages, strict=True)]
    chunk = _chunk(rows, most, max(LEAST_CHUNK_TOKENS // page_size, 1))
    pieces = _num_pieces(rows, chunk)
    if is_captured:
        tiles = _ceil_div(sum(packed), tile) + len(packed) - 1
        reserved = max(most, tiles)
        assert pieces <= reserved, "the grid of a captured step cannot grow"
        pieces = reserved
    elif chunk >= max(num_pages):
        return 0
    return heads.queries * pieces * tile * (heads.dim + 1) * FP32_BYTES


def heads_of(plan: dict[str, Any]) -> Heads:
    """Of a call to either wrapper's `plan`."""
    dim = plan["head_dim"] if "head_dim" in plan else plan["head_dim_qk"]
    return Heads(plan["num_qo_heads"], plan["num_kv_heads"], dim)


def _tile(num_queries: int, head_dim: int) -> int:
    if num_queries > 64 and head_dim < 256:
        return 128
    return 64 if num_queries > 16 else 16


def _chunk(rows: list[tuple[int, int]], most: int, least: int) -> int:
    """Pages of a piece: the fewest with which no more than `most` pieces come about."""
    low, high = least, max(pages for _, pages in rows)
    while low < high:
        middle = (low + high) // 2
        if _num_pieces(rows, middle) > most:
            low = middle + 1
        else:
            high = middle
    return low


def _num_pieces(rows: list[tuple[int, int]], chunk: int) -> int:
    return sum(tiles * _ceil_div(pages, chunk) for tiles, pages in rows)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
