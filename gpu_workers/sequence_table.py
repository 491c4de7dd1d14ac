"""A rank's own table of sequences: tokens, blocks and progress, changed only as plans say.

Block tables live in one persistent array, a line per sequence, so that building a step's batch
only selects lines.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from gpu_workers.step_plan import DrawnToken, NewBlocks, NewSequence, StepPlan
from ipc.kv_layout import blocks_for
from ipc.vocabulary import TokenLogprobs

IntArray = npt.NDArray[np.int64]


class Sequence:
    """What this rank knows of one sequence.

    `line` is its line in the block-table array; `computed` counts tokens whose keys and values
    are in the pool (or will be, once the steps launched so far have run). `num_unseen` are tokens
    after those listed, which steps draw that are under way as far as this rank knows: the rank that
    draws sees them when it collects a step, the others when a plan tells them.
    """

    __slots__ = (
        "computed",
        "line",
        "num_blocks",
        "num_unseen",
        "prompt_logprobs",
        "start",
        "tokens",
    )

    prompt_logprobs: list[TokenLogprobs | None]

    def __init__(self, start: NewSequence, line: int) -> None:
        self.start = start
        self.line = line
        self.computed = start.num_computed
        self.num_blocks = 0
        self.num_unseen = 0
        self.tokens = [*start.prompt, *start.output]
        self.prompt_logprobs = [None]  # grows with the chunks of a prompt that asked for it

    @property
    def num_prompt(self) -> int:
        return len(self.start.prompt)

    def see(self, token_id: int) -> None:
        """The first of its unseen tokens is this one."""
        assert self.num_unseen, f"sequence {self.start.sequence} has drawn nothing"
        self.tokens.append(token_id)
        self.num_unseen -= 1

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Those of the whole prompt, once, if they were asked for and are complete."""
        asked = self.start.prompt_logprobs is not None
        if not asked or len(self.prompt_logprobs) != self.num_prompt:
            return None
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken


class SequenceTable:
    """All sequences of a rank and the lines of their block tables.

    Args:
        block_size: tokens per block.
        max_tokens: the longest sequence there can be; sizes a line.
    """

    def __init__(self, *, block_size: int, max_tokens: int) -> None:
        self.block_size = block_size
        self._sequences: dict[int, Sequence] = {}
        width = blocks_for(max_tokens, block_size) + 1  # a growth block may never be used
        self.block_table: IntArray = np.zeros((INITIAL_LINES, width), dtype=np.int64)
        self._free_lines = list(range(INITIAL_LINES))

    def __getitem__(self, sequence: int) -> Sequence:
        return self._sequences[sequence]

    def __len__(self) -> int:
        return len(self._sequences)

    def append_drawn(self, drawn: Iterable[DrawnToken]) -> None:
        """Tokens that another rank drew and has in its own table."""
        for token in drawn:
            self._sequences[token.sequence].see(token.token_id)

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's removals, additions and new blocks, in this order."""
        self._remove(plan.removed)
        for start in plan.added:
            self._add(start)
        for blocks in plan.blocks:
            self._append_blocks(blocks)

    def _remove(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._free_lines.append(self._sequences.pop(sequence).line)

    def _add(self, start: NewSequence) -> None:
        assert start.sequence not in self._sequences, f"sequence {start.sequence} is here already"
        if not self._free_lines:
            self._grow()
        self._sequences[start.sequence] = Sequence(start, self._free_lines.pop())

    def _append_blocks(self, blocks: NewBlocks) -> None:
        sequence = self._sequences[blocks.sequence]
        stop = sequence.num_blocks + len(blocks.block_ids)
        self.block_table[sequence.line, sequence.num_blocks : stop] = blocks.block_ids
        sequence.num_blocks = stop

    def _grow(self) -> None:
        lines = len(self.block_table)
        self.block_table = np.concatenate((self.block_table, np.zeros_like(self.block_table)))
        self._free_lines.extend(range(lines, 2 * lines))


INITIAL_LINES = 64
