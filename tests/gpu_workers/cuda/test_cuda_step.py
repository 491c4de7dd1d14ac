"""The index arrays of a step: pages in compressed form, places of tokens, rows of padding."""

import numpy as np
import pytest

from gpu_workers.batch import build_batch
from gpu_workers.cuda_graphs import graph_sizes
from gpu_workers.cuda_step import HostStep, host_step, padded, padding_only, page_table
from gpu_workers.sequence_table import SequenceTable
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, StepPlan
from tests.gpu_workers.driving import greedy

SIZE = 4


def table(*sequences: tuple[int, int, tuple[int, ...]]) -> SequenceTable:
    """Sequences of (tokens, computed, blocks), numbered from 1."""
    made = SequenceTable(block_size=SIZE, max_tokens=64)
    added = tuple(
        NewSequence(number, (0,), tuple(range(count)), (), computed, greedy())
        for number, (count, computed, _) in enumerate(sequences, 1)
    )
    blocks = tuple(NewBlocks(number, ids) for number, (*_, ids) in enumerate(sequences, 1))
    made.apply(StepPlan(step_id=0, added=added, blocks=blocks))
    return made


def step(made: SequenceTable, *rows: tuple[int, int]) -> HostStep:
    return host_step(build_batch(made, [Row(*row, True) for row in rows]), SIZE)


@pytest.mark.parametrize(
    ("total", "pages", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)]
)
def test_a_last_page_holds_one_token_to_a_whole_page(total: int, pages: int, last: int) -> None:
    found = page_table(np.array([[7, 3, 9]]), np.array([total]), SIZE)
    assert found.indices.tolist() == [7, 3, 9][:pages]
    assert found.last_page_len.tolist() == [last]
    assert found.indptr.tolist() == [0, pages]


def test_decodes_come_first_and_each_part_has_its_own_table() -> None:
    made = table((6, 0, (5, 2)), (9, 8, (1, 4, 6)), (7, 2, (8, 3)))
    found = step(made, (1, 6), (2, 1), (3, 5))
    assert found.num_decode == 1
    assert found.row_starts.tolist() == [0, 1, 7, 12]
    assert found.pages.indices.tolist() == [1, 4, 6, 5, 2, 8, 3]
    decode, prefill = found.pages.rows(0, 1), found.pages.rows(1, 3)
    assert (decode.indptr.tolist(), decode.indices.tolist()) == ([0, 3], [1, 4, 6])
    assert (prefill.indptr.tolist(), prefill.indices.tolist()) == ([0, 2, 4], [5, 2, 8, 3])
    assert prefill.last_page_len.tolist() == [2, 3]


def test_tokens_are_written_where_their_positions_are() -> None:
    found = step(table((7, 2, (8, 3))), (1, 5))
    assert found.blocks.tolist() == [8, 8, 3, 3, 3]
    assert found.offsets.tolist() == [2, 3, 0, 1, 2]
    assert found.owners.tolist() == [0] * 5


def test_all_tables_are_of_the_librarys_index_type() -> None:
    found = padded(step(table((5, 4, (1, 2))), (1, 1)), 3, 63)
    pages = (found.pages.indptr, found.pages.indices, found.pages.last_page_len)
    assert {array.dtype for array in (*pages, found.owners, found.row_starts)} == {
        np.dtype(np.int32)
    }


def test_rows_of_padding_are_one_token_in_the_spare_block() -> None:
    found = padded(step(table((5, 4, (1, 2)), (3, 2, (6,))), (1, 1), (2, 1)), 4, 63)
    assert found.pages.indptr.tolist() == [0, 1, 3, 4, 5]
    assert found.pages.indices.tolist() == [6, 1, 2, 63, 63]
    assert found.pages.last_page_len.tolist() == [3, 1, 1, 1]
    assert found.blocks.tolist() == [6, 2, 63, 63]
    assert found.num_decode == len(found.token_ids) == 4
    assert padding_only(2, 63).pages.indices.tolist() == [63, 63]


def test_a_step_with_a_prompt_is_not_padded() -> None:
    with pytest.raises(AssertionError, match="only decode rows"):
        padded(step(table((5, 0, (1, 2))), (1, 5)), 8, 63)


def test_a_token_that_only_the_device_has_is_named_with_its_line() -> None:
    made = table((5, 4, (1, 2)), (3, 2, (6,)))
    sequence = made[1]
    sequence.computed, sequence.num_unseen = 5, 1
    found = step(made, (1, 1), (2, 1))
    assert found.unseen.tolist() == [1]  # the longer row comes last
    assert found.lines.tolist() == [sequence.line]
    assert found.token_ids.tolist() == [2, 0]


def test_graphs_are_of_small_sizes_then_of_every_eighth_and_the_largest() -> None:
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graph_sizes(18) == [1, 2, 4, 8, 16, 18]
    assert graph_sizes(3) == [1, 2, 3]
