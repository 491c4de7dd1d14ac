"""An engine without arithmetic whose tokens depend on what its blocks really hold.

Every slot of a pool holds the token that was last written there. Rows are carried out when their
step is collected, as by a device that lags behind; copies and pulls at launch, as by a copy engine
beside it. A token is drawn from what is read back, so that a block given away too early, a copy
out of the wrong pool or a token counted twice changes the answer.
"""

from typing import NamedTuple

from gpu_workers.step_plan import (
    NewSequence,
    Pull,
    PullResult,
    RowResult,
    StepPlan,
    StepResult,
)
from ipc.vocabulary import TokenLogprobs

Cells = list[list[int | None]]
NUM_LETTERS = 26


def letter(prompt: list[int], choice: int, index: int) -> int:
    """The `index`-th output token of a choice: the byte of a letter, so that texts can be cut."""
    return ord("a") + (31 * sum(prompt) + 7 * choice + 5 * index + index * index) % NUM_LETTERS


class MemoryExchange:
    """One instance's pool, and those of the peers that it knows."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cells: Cells = [[None] * block_size for _ in range(num_blocks)]
        self.peers: dict[tuple[str, int], Cells] = {}
        self._finished: list[PullResult] = []

    def knows(self, instance: str, epoch: int) -> bool:
        return (instance, epoch) in self.peers

    def unmap_instance(self, instance: str, epoch: int) -> None:
        self.peers.pop((instance, epoch), None)

    def begin(self, pull: Pull) -> None:
        source = self.peers[pull.handle.owner, pull.handle.epoch]
        for theirs, ours in zip(pull.handle.block_ids, pull.into, strict=True):
            self.cells[ours] = list(source[theirs])
        self._finished.append(PullResult(pull.handle.request_id, 1024, 1.0, 2.0))

    def finished(self) -> list[PullResult]:
        results, self._finished = self._finished, []
        return results


class _Sequence:
    def __init__(self, start: NewSequence) -> None:
        self.start = start
        self.tokens = [*start.prompt, *start.output]
        self.computed = start.num_computed
        self.num_unseen = 0  # tokens that steps under way draw
        self.blocks: list[int] = []


class _Row(NamedTuple):
    """As it stood at launch."""

    sequence: _Sequence
    blocks: tuple[int, ...]
    first: int
    stop: int
    draws: bool


class _Launched(NamedTuple):
    step_id: int
    rows: tuple[_Row, ...]


class MemoryExecutor:
    """Keeps its table as plans say, and its tokens in the exchange's cells."""

    def __init__(self, exchange: MemoryExchange, block_size: int) -> None:
        self.table: dict[int, _Sequence] = {}
        self._exchange = exchange
        self._block_size = block_size

    def launch(self, plan: StepPlan) -> _Launched:
        for instance, epoch in plan.unmapped:
            self._exchange.unmap_instance(instance, epoch)
        for removed in plan.removed:
            del self.table[removed]
        for start in plan.added:
            assert start.sequence not in self.table
            self.table[start.sequence] = _Sequence(start)
        for blocks in plan.blocks:
            self.table[blocks.sequence].blocks += blocks.block_ids
        cells = self._exchange.cells
        for copy in plan.copies:
            cells[copy.target] = list(cells[copy.source])
        for pull in plan.pulls:
            self._exchange.begin(pull)
        rows = tuple(self._advance(row.sequence, row.num_new, row.draws) for row in plan.rows)
        return _Launched(plan.step_id, rows)

    def collect(self, launched: _Launched) -> StepResult:
        cells = self._exchange.cells
        for row in launched.rows:
            for index in range(row.first, row.stop):
                block, offset = divmod(index, self._block_size)
                cells[row.blocks[block]][offset] = row.sequence.tokens[index]
        return StepResult(
            launched.step_id, tuple(self._draw(row) for row in launched.rows if row.draws)
        )

    def _advance(self, name: int, num_new: int, draws: bool) -> _Row:
        sequence = self.table[name]
        first, sequence.computed = sequence.computed, sequence.computed + num_new
        known = len(sequence.tokens) + sequence.num_unseen
        assert sequence.computed <= known, "a token was computed before it was drawn"
        assert len(sequence.blocks) * self._block_size >= sequence.computed
        assert draws == (sequence.computed == known)
        sequence.num_unseen += draws and len(sequence.start.choices) == 1
        return _Row(sequence, tuple(sequence.blocks), first, sequence.computed, draws)

    def _draw(self, row: _Row) -> RowResult:
        sequence, start = row.sequence, row.sequence.start
        index = row.stop - len(start.prompt)
        is_right = self._read(row) == sequence.tokens[: row.stop]
        tokens = tuple(
            letter(sequence.tokens[: len(start.prompt)], choice, index)
            if is_right
            else ord("#")  # what is read is not what was written
            for choice in start.choices
        )
        if len(tokens) == 1:
            sequence.tokens.append(tokens[0])
            sequence.num_unseen -= 1
        return RowResult(start.sequence, tokens, tuple(TokenLogprobs(t, -1.0) for t in tokens))

    def _read(self, row: _Row) -> list[int | None]:
        cells = self._exchange.cells
        return [token for block in row.blocks for token in cells[block]][: row.stop]
