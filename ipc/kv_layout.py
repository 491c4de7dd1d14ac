"""Who holds which layers and heads of the KV cache, and what one rank must copy from another.

Pure arithmetic: no memory, no processes. A pool is `[blocks, kv_heads, layers, 2, block_size,
head_dim]`, so a block, and any head range of a block, is one contiguous run.
"""

from collections.abc import Sequence

import msgspec

from ipc.vocabulary import DType


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A half-open range of global indices."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def meet(self, other: "Span") -> "Span | None":
        """The part that both hold, or None."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None


class RankLayout(msgspec.Struct, frozen=True):
    """One worker's pool: its global layers and heads, and the shape of its blocks."""

    layers: Span
    heads: Span
    num_blocks: int
    block_size: int
    head_dim: int
    dtype: DType

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """[blocks, kv_heads, layers, 2, block_size, head_dim]"""
        return (
            self.num_blocks,
            self.heads.size,
            self.layers.size,
            2,
            self.block_size,
            self.head_dim,
        )

    @property
    def plane_bytes(self) -> int:
        """Keys and values of one (head, layer) of one block: the smallest run that is ever cut."""
        return 2 * self.block_size * self.head_dim * self.dtype.num_bytes

    @property
    def block_bytes(self) -> int:
        return self.heads.size * self.layers.size * self.plane_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)


def fork_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks that a prompt of so many computed tokens takes for all its choices together.

    Full blocks are shared by all; each choice after the first has its own copy of a partial one.
    """
    has_partial = num_tokens % block_size != 0
    return blocks_for(num_tokens, block_size) + (num_choices - 1 if has_partial else 0)


class Piece(msgspec.Struct, frozen=True):
    """What one destination rank copies from one source rank, for every block: local indices."""

    source: int
    src_head: int
    dst_head: int
    num_heads: int
    src_layer: int
    dst_layer: int
    num_layers: int

    @property
    def num_planes(self) -> int:
        """Of one block."""
        return self.num_heads * self.num_layers


class LayoutMismatch(ValueError):
    """Two pools whose blocks cannot be copied into each other; names both values."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-num_tokens // block_size)


def check_same_blocks(destination: RankLayout, source: RankLayout) -> None:
    """Raises LayoutMismatch when blocks of one cannot be copied into the other's."""
    for field in ("block_size", "head_dim", "dtype"):
        ours, theirs = getattr(destination, field), getattr(source, field)
        if ours != theirs:
            raise LayoutMismatch(f"{field} differs: {theirs} at the source, {ours} here")


def pieces(destination: RankLayout, sources: Sequence[RankLayout]) -> list[Piece]:
    """What `destination` copies from each of `sources` so that each plane is written once.

    Where several sources hold the same heads (tp above the number of KV heads), the first one
    that holds them gives them.

    Raises:
        LayoutMismatch: block size, head width or element type differ, or a plane has no source.
    """
    found: list[Piece] = []
    covered: set[tuple[int, int]] = set()
    for index, source in enumerate(sources):
        check_same_blocks(destination, source)
        layers, heads = destination.layers.meet(source.layers), destination.heads.meet(source.heads)
        if layers is None or heads is None or (layers.start, heads.start) in covered:
            continue
        covered.update((la, h) for la in range(*_ends(layers)) for h in range(*_ends(heads)))
        found.append(
            Piece(
                source=index,
                src_head=heads.start - source.heads.start,
                dst_head=heads.start - destination.heads.start,
                num_heads=heads.size,
                src_layer=layers.start - source.layers.start,
                dst_layer=layers.start - destination.layers.start,
                num_layers=layers.size,
            )
        )
    if len(covered) != destination.layers.size * destination.heads.size:
        raise LayoutMismatch(
            f"the sources hold {len(covered)} of the {destination.layers.size} layers x "
            f"{destination.heads.size} heads that are to be pulled"
        )
    return found


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop
