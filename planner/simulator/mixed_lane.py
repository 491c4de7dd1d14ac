"""A micro-batch of a colocated instance: steps that compute prompts, decode, or do both.

Where the leader plans ahead (`InstanceModel.plans_ahead`), a step's plan was made as the one
before it began: who came or left since does not change it.
"""

from math import inf, nextafter
from typing import TYPE_CHECKING, NamedTuple

from ipc.prefill_policy import Turn
from planner.simulator.chunks import Started, deal_out
from planner.simulator.lane import Lane
from planner.simulator.passage import Passage, chunk_of

if TYPE_CHECKING:
    from planner.simulator.mixed import MixedInstance


class _Left(NamedTuple):
    """Blocks and places of those that a step ended."""

    at_s: float
    num_blocks: int
    num_places: int


class MixedLane(Lane):
    """A lane whose steps may compute prompts. `is_running` covers runs of decode steps alone."""

    pool: "MixedInstance"

    def __init__(self, pool: "MixedInstance") -> None:
        super().__init__(pool)
        self.is_prefilling = False
        self._ends_s = 0.0  # the step that computes prompts
        self._left: list[_Left] = []  # by the last step and the one before it
        self._batch: list[Turn[Passage]] = []
        self._started: list[Started] = []

    @property
    def load(self) -> int:
        return super().load + len(self._batch) + len(self._started)

    @property
    def is_idle(self) -> bool:
        return not self.is_running and not self.is_prefilling

    def leave(self, now_s: float) -> None:
        free, num_admitted = self.pool.free, self.pool.num_admitted
        super().leave(now_s)
        self.is_prefilling = False
        batch, self._batch = self._batch, []
        for passage in [*self.pool.computed(self, batch, now_s), *self._take_chunks()]:
            self.pool.prefilled(self, passage, now_s)
        if self.pool.plans_ahead:
            left = _Left(now_s, self.pool.free - free, num_admitted - self.pool.num_admitted)
            self._left = [each for each in self._left if each.at_s >= self._began_s] + [left]

    def plan(self, now_s: float) -> None:
        self.started_s, self.num_steps = now_s, 0
        self.pool.welcome(self._latest_arrival(now_s))
        self.pool.set_aside(*self._late(now_s))
        if self.pool.chunk_tokens is not None:
            seconds = self._chunked_step(now_s, self.pool.chunk_tokens)
        else:
            seconds = self._prompts_alone(now_s)
        if seconds is None:
            super().plan(now_s)
        else:
            self.is_prefilling = True
            self._ends_s = now_s + seconds + self.pool.overheads.prefill_step_s
            self._wake(self._ends_s)
        if self.pool.queue:
            self.pool.stop_others(self, now_s)

    def next_boundary(self, when_s: float) -> float:
        return self._ends_s if self.is_prefilling else super().next_boundary(when_s)

    def _steps_until(self, when_s: float) -> int:
        return 1 if self.is_prefilling else super()._steps_until(when_s)

    def stop_for_arrival(self, now_s: float) -> None:
        """End the run at the boundary at which one who arrives now may enter."""
        num_steps = min(self._steps_until(now_s), self.num_steps)
        end_s = self.boundary(num_steps)
        is_in_time = now_s <= self.pool.latest_arrival(self.boundary(num_steps - 1), end_s)
        self.stop_from(now_s if is_in_time else nextafter(end_s, inf))

    def _last_began_s(self) -> float:
        return self.started_s if self.is_prefilling else super()._last_began_s()

    def _planned_s(self, now_s: float) -> float:
        if self._has_members_by(self._began_s) or self.pool.queue or self._at_hand():
            return self._began_s
        # Nothing more to do as the last step began: the first one to come was.
        return self.pool.arriving[0][0] if self.pool.arriving else now_s

    def _latest_arrival(self, now_s: float) -> float:
        """Who came later is not seen by the plan of the step that begins now."""
        if not self.pool.plans_ahead:
            has_work = bool(self.members or self._started)
            return self.pool.latest_arrival(self._began_s if has_work else now_s, now_s)
        return self._seen_s

    def _at_hand(self) -> list[Started]:
        """Prompts whose next chunk may be planned: not while the one before it runs."""
        return [started for started in self._started if not started.is_fresh]

    def _longest_run(self) -> int:
        return 1 if self.pool.arriving or self._has_missed() else super()._longest_run()

    def _has_missed(self) -> bool:
        """Whether a prompt may enter the next step only because this one was planned early."""
        if not self.pool.plans_ahead:
            return False
        return bool(self._started or (self.pool.queue and any(x.num_places for x in self._left)))

    def _late(self, now_s: float) -> tuple[int, int]:
        """Blocks and places that the plan of the step that begins now did not know to be free: it
        was made before those who left did, and blocks are free when the steps that were launched
        by then have ended too."""
        if self._seen_s >= now_s:
            return 0, 0
        left = [each for each in self._left if each.at_s >= self._seen_s]
        blocks = sum(each.num_blocks for each in left)
        return blocks, sum(each.num_places for each in left if each.at_s > self._seen_s)

    def _make_room(self, now_s: float) -> bool:
        if self.pool.preempts_prompts:
            while self._started and self._growth(1) > self.pool.free:
                started = self._started.pop()
                self.pool.put_back(started.passage, started.num_computed)
        return super()._make_room(now_s)

    def _prompts_alone(self, now_s: float) -> float | None:
        """Prompts first; None when none waits or fits."""
        self._batch = self.pool.next_batch(now_s)
        if not self._batch:
            return None
        estimate = self.pool.latency.prefill([chunk_of(turn) for turn in self._batch])
        return self.pool.num_lanes * estimate.seconds

    def _chunked_step(self, now_s: float, budget: int) -> float | None:
        """Every decode, and chunks of prompts in what the budget leaves; None without prompts."""
        if not self._started and not self.pool.queue:
            return None
        num_preempted = self.pool.record.num_preemptions
        self._make_room(now_s)
        is_calm = self.pool.record.num_preemptions == num_preempted
        batch, context = len(self.members), self._context_tokens
        growth = self._growth(1)
        self.pool.free -= growth
        budget -= batch
        at_hand = self._at_hand() if self._seen_s < now_s else list(self._started)
        if is_calm or not self.pool.preempts_prompts:
            newcomers = self._newcomers(now_s, budget, at_hand)
            self._started += newcomers
            at_hand += newcomers
        if not (batch or at_hand):
            at_hand = list(self._started)  # nothing was planned in their place
        chunks = deal_out(at_hand, budget)
        if not chunks:
            self.pool.free += growth
            return None
        self.num_steps = 1 if batch else 0
        estimate = self.pool.latency.mixed(chunks, batch, context)
        return self.pool.num_lanes * estimate.seconds + batch * self.pool.overheads.decode_row_s

    def _newcomers(self, now_s: float, budget: int, before: list[Started]) -> list[Started]:
        wanted = budget - sum(started.remaining for started in before)
        newcomers = []
        while wanted > 0 and (started := self.pool.next_one(now_s)) is not None:
            newcomers.append(started)
            wanted -= started.remaining
        return newcomers

    def _take_chunks(self) -> list[Passage]:
        """The step is over. Returns the prompts that it finished."""
        for started in self._started:
            started.num_computed += started.num_new
            self.pool.queued_tokens -= started.num_new
            started.is_fresh, started.num_new = started.num_new > 0, 0
        done = [started.passage for started in self._started if not started.remaining]
        self._started = [started for started in self._started if started.remaining]
        return done
