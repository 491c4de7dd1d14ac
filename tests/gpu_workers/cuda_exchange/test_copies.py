"""Copy plans: few calls, every byte once, and carried out on plain memory they move the pieces."""

import itertools

import msgspec
import numpy as np
import pytest

from gpu_workers.cuda_copies import CopyPlan, Run, Staged, all_runs, plan_copies, staged
from ipc.kv_layout import RankLayout, Span, pieces
from tests.gpu_workers.cuda_exchange.rigs import WHOLE, ranks

SHAPES = list(itertools.product((1, 2, 4), (1, 2)))
BLOCKS = [(6, 0), (1, 3), (2, 4), (3, 5), (5, 6)]
BLOCK = WHOLE.block_bytes


def plan(
    source: RankLayout,
    target: RankLayout,
    blocks: list[tuple[int, int]] = BLOCKS,
    batch_below: int = 0,
) -> CopyPlan:
    (piece,) = pieces(msgspec.structs.replace(target), [source])
    return plan_copies(source, target, piece, blocks, batch_below=batch_below)


def memory(layout: RankLayout, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, layout.pool_bytes, dtype=np.uint8)


def carry_out(runs: list[Run], source: np.ndarray, target: np.ndarray) -> None:
    for run in runs:
        target[run.target : run.target + run.num_bytes] = source[
            run.source : run.source + run.num_bytes
        ]


def in_shape(pool: np.ndarray, layout: RankLayout) -> np.ndarray:
    blocks, heads, layers = layout.shape[:3]
    return pool.reshape(blocks, heads, layers, layout.plane_bytes)


@pytest.mark.parametrize("source", SHAPES, ids=str)
@pytest.mark.parametrize("target", SHAPES, ids=str)
@pytest.mark.parametrize("batch_below", [0, 1 << 20])
def test_a_plan_moves_the_piece_of_every_block_and_nothing_else(
    source: tuple[int, int], target: tuple[int, int], batch_below: int
) -> None:
    sources = ranks(*source)
    pools = [memory(layout, seed) for seed, layout in enumerate(sources)]
    for rank in ranks(*target):
        ours = memory(rank, 99)
        expected = in_shape(ours.copy(), rank)
        for piece in pieces(rank, sources):
            of = sources[piece.source]
            plan = plan_copies(of, rank, piece, BLOCKS, batch_below=batch_below)
            theirs = in_shape(pools[piece.source], of)
            heads, layers = piece.num_heads, piece.num_layers
            for src, dst in BLOCKS:
                expected[
                    dst,
                    piece.dst_head : piece.dst_head + heads,
                    piece.dst_layer : piece.dst_layer + layers,
                ] = theirs[
                    src,
                    piece.src_head : piece.src_head + heads,
                    piece.src_layer : piece.src_layer + layers,
                ]
            carry_out(list(all_runs(plan)), pools[piece.source], ours)
            assert plan.num_bytes == len(BLOCKS) * piece.num_planes * rank.plane_bytes
        assert np.array_equal(in_shape(ours, rank), expected)


def test_blocks_that_follow_each_other_on_both_sides_are_one_copy() -> None:
    assert plan(WHOLE, WHOLE).runs == (
        Run(6 * BLOCK, 0, BLOCK),
        Run(1 * BLOCK, 3 * BLOCK, 3 * BLOCK),
        Run(5 * BLOCK, 6 * BLOCK, BLOCK),
    )


def test_heads_that_are_cut_otherwise_are_one_run_a_block() -> None:
    half = ranks(2, 1)[1]
    runs = plan(WHOLE, half, [(4, 1), (2, 7)]).runs
    size = half.block_bytes
    assert runs == (Run(4 * BLOCK + size, size, size), Run(2 * BLOCK + size, 7 * size, size))


def test_layers_that_are_cut_otherwise_are_rows_one_for_each_head() -> None:
    stage = ranks(1, 2)[1]
    (rows,) = plan(WHOLE, stage, [(4, 1)]).rows
    plane = WHOLE.plane_bytes
    assert (rows.width, rows.height) == (2 * plane, 4)
    assert (rows.source_pitch, rows.target_pitch) == (4 * plane, 2 * plane)
    assert (rows.source, rows.target) == (4 * BLOCK + 2 * plane, stage.block_bytes)


def test_rows_of_blocks_that_follow_each_other_are_one_copy_too() -> None:
    (first, second) = plan(WHOLE, ranks(1, 2)[0], [(1, 3), (2, 4), (6, 5)]).rows
    assert (first.height, second.height) == (8, 4)


def test_rows_of_a_part_of_the_heads_are_not_joined() -> None:
    wide, narrow = WHOLE, msgspec.structs.replace(WHOLE, heads=Span(0, 2), layers=Span(0, 2))
    assert [rows.height for rows in plan(wide, narrow, [(1, 3), (2, 4)]).rows] == [2, 2]


def test_copies_below_the_threshold_are_gathered_and_others_are_not() -> None:
    found = plan(WHOLE, WHOLE, batch_below=2 * BLOCK)
    assert [run.num_bytes for run in found.runs] == [3 * BLOCK]
    assert [run.num_bytes for run in found.batch] == [BLOCK, BLOCK]


def test_a_single_small_copy_is_no_batch() -> None:
    found = plan(WHOLE, WHOLE, [(1, 1)], batch_below=1 << 20)
    assert (len(found.runs), found.batch) == (1, ())


def test_slots_are_filled_to_the_brim_and_runs_are_cut_where_they_end() -> None:
    filled = list(staged([Run(0, 100, 6), Run(50, 200, 9)], slot_bytes=10, max_runs=9))
    assert filled == [
        [Staged(Run(0, 100, 6), 0), Staged(Run(50, 200, 4), 6)],
        [Staged(Run(54, 204, 5), 0)],
    ]


def test_nothing_to_copy_fills_no_slot() -> None:
    assert list(staged([], slot_bytes=10, max_runs=9)) == []


def test_a_slot_takes_no_more_runs_than_one_message_names() -> None:
    runs = [Run(10 * place, place, 1) for place in range(5)]
    assert [len(slot) for slot in staged(runs, slot_bytes=10, max_runs=2)] == [2, 2, 1]
