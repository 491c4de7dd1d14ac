"""Turn a step plan's rows into the tensors of one forward pass.

Rows of one new token (decode) come first, shortest sequence first, so that their tokens are one
contiguous run and neighbours are of similar length; longer rows (prompts and chunks) follow.
Everything here is index arithmetic on the host.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from gpu_workers.sequence_table import IntArray, Sequence, SequenceTable
from gpu_workers.step_plan import Row
from ipc.kv_layout import blocks_for


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's share of a batch: its tokens are `start : start + num_new` of T."""

    sequence: Sequence
    start: int
    computed: int
    num_new: int
    draws: bool

    @property
    def total(self) -> int:
        """Tokens that the row's last token attends to, itself included."""
        return self.computed + self.num_new

    @property
    def goes_on(self) -> bool:
        """Whether it draws the token that this very sequence goes on with: a single choice."""
        return self.draws and len(self.sequence.start.choices) == 1

    @property
    def ends_unseen(self) -> bool:
        """Whether the last of its tokens is drawn by a step under way: only the device has it."""
        return self.total > len(self.sequence.tokens)

    @property
    def prompt_logprob_span(self) -> tuple[int, int]:
        """Tokens of T whose logits say how likely the prompt token after them was."""
        if self.sequence.start.prompt_logprobs is None:
            return self.start, self.start
        wanted = min(self.num_new, self.sequence.num_prompt - 1 - self.computed)
        return self.start, self.start + max(wanted, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step, decode rows first.

    token_ids, positions: int64 (T,). A token id that only the device has is 0 here.
    slots: int64 (T,), where each token's keys and values go: block_id * block_size + offset.
    block_table: int64 (R, W), the rows' blocks; entries past a row's last block are arbitrary.
    computed: int64 (R,), tokens before each row's new ones.
    num_decode: how many of the rows (and of the tokens) are decode rows.
    head_rows: int64 (N,), tokens of T that go through the LM head: the last one of each drawing
        row in order, then every token in a row's `prompt_logprob_span`. None means all T in order.
    """

    rows: tuple[BatchRow, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: IntArray
    block_table: IntArray
    computed: IntArray
    num_decode: int
    head_rows: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(table: SequenceTable, rows: Items[Row]) -> Batch:
    """The batch of a plan's rows, from the table as it stands before they are launched."""
    placed = _place(table, rows)
    num_decode = sum(row.num_new == 1 for row in placed)
    computed = np.array([row.computed for row in placed], dtype=np.int64)
    width = blocks_for(max(row.total for row in placed), table.block_size)
    lines = [row.sequence.line for row in placed]
    block_table = table.block_table[lines, :width]
    positions, owners = _positions(placed, computed, num_decode)
    return Batch(
        rows=placed,
        token_ids=_token_ids(placed),
        positions=torch.from_numpy(positions),
        slots=_slots(block_table, positions, owners, table.block_size),
        block_table=block_table,
        computed=computed,
        num_decode=num_decode,
        head_rows=_head_rows(placed, len(positions)),
    )


def _place(table: SequenceTable, rows: Items[Row]) -> tuple[BatchRow, ...]:
    placed, start = [], 0
    for row in sorted(rows, key=lambda row: (row.num_new != 1, table[row.sequence].computed)):
        sequence = table[row.sequence]
        num_tokens = len(sequence.tokens) + sequence.num_unseen
        assert sequence.computed + row.num_new <= num_tokens, f"{row} passes its tokens"
        placed.append(BatchRow(sequence, start, sequence.computed, row.num_new, row.draws))
        start += row.num_new
    return tuple(placed)


def _token_ids(rows: Items[BatchRow]) -> torch.Tensor:
    token_ids: list[int] = []
    for row in rows:
        token_ids += row.sequence.tokens[row.computed : row.total]
        if len(token_ids) < row.start + row.num_new:
            token_ids.append(0)
    return torch.tensor(token_ids, dtype=torch.int64)


def _positions(
    rows: Items[BatchRow], computed: IntArray, num_decode: int
) -> tuple[IntArray, IntArray]:
    """Each token's position in its sequence, and the row it belongs to: (T,) both."""
    if num_decode == len(rows):
        return computed.copy(), np.arange(len(rows))
    num_new = np.array([row.num_new for row in rows])
    owners = np.repeat(np.arange(len(rows)), num_new)
    starts = np.array([row.start for row in rows])
    return np.arange(len(owners)) - starts[owners] + computed[owners], owners


def _slots(table: IntArray, positions: IntArray, owners: IntArray, block_size: int) -> IntArray:
    slots: IntArray = table[owners, positions // block_size] * block_size + positions % block_size
    return slots


def _head_rows(rows: Items[BatchRow], num_tokens: int) -> torch.Tensor | None:
    wanted = [row.start + row.num_new - 1 for row in rows if row.draws]
    for row in rows:
        wanted += range(*row.prompt_logprob_span)
    if len(wanted) == num_tokens and wanted == list(range(num_tokens)):
        return None
    return torch.tensor(wanted, dtype=torch.int64)
