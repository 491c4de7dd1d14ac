"""The overlap arithmetic: each plane of the destination is written once, by one that holds it."""

import itertools

import pytest

from ipc.kv_layout import LayoutMismatch, RankLayout, Span, blocks_for, fork_blocks, pieces
from ipc.vocabulary import DType

NUM_LAYERS = 6
SHAPES = list(itertools.product((1, 2, 3, 6), (1, 2, 3)))  # (tp, pp)


def ranks(tp: int, pp: int, num_heads: int = 6) -> list[RankLayout]:
    """The layouts of an instance's workers; heads are replicated when tp passes their number."""
    layouts = []
    for stage, rank in itertools.product(range(pp), range(tp)):
        layers = Span(stage * NUM_LAYERS // pp, (stage + 1) * NUM_LAYERS // pp)
        if tp <= num_heads:
            heads = Span(rank * num_heads // tp, (rank + 1) * num_heads // tp)
        else:
            heads = Span(rank * num_heads // tp, rank * num_heads // tp + 1)
        layouts.append(layout(layers, heads))
    return layouts


def layout(layers: Span, heads: Span, **other: object) -> RankLayout:
    shape: dict[str, object] = {"block_size": 16, "head_dim": 64, "dtype": DType.BF16}
    return RankLayout(layers=layers, heads=heads, num_blocks=10, **(shape | other))  # type: ignore[arg-type]


@pytest.mark.parametrize("source_shape", SHAPES)
@pytest.mark.parametrize("target_shape", SHAPES)
@pytest.mark.parametrize("num_heads", [2, 6])
def test_every_plane_is_written_once_from_a_rank_that_holds_it(
    source_shape: tuple[int, int], target_shape: tuple[int, int], num_heads: int
) -> None:
    sources = ranks(*source_shape, num_heads=num_heads)
    for target in ranks(*target_shape, num_heads=num_heads):
        written: list[tuple[int, int]] = []
        for piece in pieces(target, sources):
            source = sources[piece.source]
            for layer, head in itertools.product(range(piece.num_layers), range(piece.num_heads)):
                plane = (
                    target.layers.start + piece.dst_layer + layer,
                    target.heads.start + piece.dst_head + head,
                )
                held = (
                    source.layers.start + piece.src_layer + layer,
                    source.heads.start + piece.src_head + head,
                )
                assert plane == held
                assert source.layers.start <= held[0] < source.layers.stop
                assert source.heads.start <= held[1] < source.heads.stop
                written.append(plane)
        wanted = itertools.product(range(*span(target.layers)), range(*span(target.heads)))
        assert sorted(written) == list(wanted)


def span(of: Span) -> tuple[int, int]:
    return of.start, of.stop


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 32), ("head_dim", 128), ("dtype", DType.FP32)]
)
def test_blocks_that_differ_are_refused_with_both_values(field: str, value: object) -> None:
    ours = layout(Span(0, 2), Span(0, 2))
    theirs = layout(Span(0, 2), Span(0, 2), **{field: value})
    with pytest.raises(LayoutMismatch, match=f"{field} differs: {value} at the source, "):
        pieces(ours, [theirs])


def test_a_plane_that_no_source_holds_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="hold 2 of the 2 layers x 2 heads"):
        pieces(layout(Span(0, 2), Span(0, 2)), [layout(Span(0, 1), Span(0, 2))])


def test_a_block_is_one_run_of_its_planes() -> None:
    one = layout(Span(0, 30), Span(0, 3))
    assert one.block_bytes == 3 * 30 * 2 * 16 * 64 * 2
    assert one.pool_bytes == 10 * one.block_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_are_counted_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


@pytest.mark.parametrize(
    ("tokens", "choices", "blocks"), [(16, 1, 1), (16, 3, 1), (17, 1, 2), (17, 3, 4), (5, 2, 2)]
)
def test_choices_share_full_blocks_and_copy_the_partial_one(
    tokens: int, choices: int, blocks: int
) -> None:
    assert fork_blocks(tokens, choices, 16) == blocks
