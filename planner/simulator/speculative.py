"""Decode with speculation: a step gives each sequence one token and what was accepted besides.

How many are accepted is drawn for each sequence and step, so that the spread of TPOT is real:
`1 + accepted` tokens, where each drafted token is accepted with the same probability as long as
all before it were (Leviathan et al., arXiv 2211.17192, section 3.1: (1 - a^(g+1)) / (1 - a) on
average). Nothing is skipped: every step is taken.
"""

import heapq

import numpy as np

from ipc.kv_layout import blocks_for
from planner.simulator.decode import DecodePool
from planner.simulator.lane import Lane
from planner.simulator.passage import Passage
from planner.simulator.service import Speculation


class SpeculativeLane(Lane):
    """Members keep their own count of tokens drawn; steps are of unequal progress."""

    pool: "SpeculativePool"

    def __init__(self, pool: "SpeculativePool") -> None:
        super().__init__(pool)
        self._drawn: dict[Passage, int] = {}

    def join(self, passage: Passage, now_s: float) -> None:
        super().join(passage, now_s)
        self._drawn[passage] = 0

    def leave(self, now_s: float) -> None:
        for passage in [p for p, drawn in self._drawn.items() if drawn >= p.remaining]:
            self.members.remove((passage.leave_step, passage))
            heapq.heapify(self.members)
            self._forget(passage, passage.remaining)
            self.pool.ended(passage, now_s)

    def preempt(self, passage: Passage, now_s: float) -> None:
        self.members.remove((passage.leave_step, passage))
        heapq.heapify(self.members)
        num_drawn = self._drawn[passage]
        self._forget(passage, num_drawn)
        self.pool.preempted(passage, num_drawn, now_s)

    def _settle(self, now_s: float) -> None:
        """Draw each member's progress; blocks that the step did not use come back."""
        if self.num_steps:
            self.pool.free += self._growth(1)
            drawn = self.pool.draw(len(self._drawn))
            for passage, num_new in zip(list(self._drawn), drawn, strict=True):
                before = self._drawn[passage]
                after = min(before + num_new, passage.remaining)
                self._drawn[passage] = after
                self.pool.free -= self._blocks(passage, after) - self._blocks(passage, before)
                self._context_tokens += after - before
            self._stall_s, self.num_steps = 0.0, 0
        self.started_s = now_s

    def _forget(self, passage: Passage, num_drawn: int) -> None:
        del self._drawn[passage]
        self._context_tokens -= passage.num_tokens + num_drawn + 1
        self.pool.free += self._blocks(passage, num_drawn)

    def _growth(self, num_steps: int) -> int:
        """Blocks for the longest progress that the next step can make."""
        most = self.pool.most_per_step
        return sum(
            self._blocks(passage, min(drawn + most, passage.remaining))
            - self._blocks(passage, drawn)
            for passage, drawn in self._drawn.items()
        )

    def _blocks(self, passage: Passage, num_drawn: int) -> int:
        return blocks_for(passage.num_tokens + num_drawn, self.pool.block_size)


class SpeculativePool(DecodePool):
    """A decode instance that speculates; `speculate` says how, before anything arrives."""

    lane_type = SpeculativeLane

    def speculate(self, speculation: Speculation, seed: int) -> None:
        self._speculation = speculation
        self._random = np.random.default_rng(seed)
        self.max_skip = 1

    @property
    def most_per_step(self) -> int:
        return self._speculation.num_drafted + 1

    def draw(self, count: int) -> list[int]:
        """Tokens of one step for so many sequences."""
        rejected_at = self._random.geometric(1 - self._speculation.acceptance, count)
        return [min(int(tokens), self.most_per_step) for tokens in rejected_at]
