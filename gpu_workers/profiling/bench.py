"""Do one step or one pull and time it, as the leader of an instance pays for it.

A step is `launch` and `collect` of a plan on the executor that would serve; a pull is one from a
second pool, which the executor's place has made.
"""

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gpu_workers.models.layers import Model
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.step_plan import (
    DrawnToken,
    NewBlocks,
    NewSequence,
    Pull,
    PullResult,
    Row,
    StepPlan,
    StepResult,
)
from ipc.kv_layout import blocks_for
from ipc.vocabulary import KVHandle, SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 30, seed=0, temperature=0.0)
PEER, EPOCH = "peer", 1
NUM_FOLLOWING = 8  # decode steps of the same sequences in a row


class Pulls(Protocol):
    """Our pool, and what has been copied into it."""

    @property
    def pool(self) -> torch.Tensor: ...

    def finished(self) -> list[PullResult]: ...


class Engine(Protocol):
    """What is measured: an executor, or a whole instance behind the face of one."""

    @property
    def exchange(self) -> Pulls: ...

    @property
    def model(self) -> Model: ...

    @property
    def num_token_ids(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def kernels_name(self) -> str: ...

    @property
    def max_in_flight(self) -> int: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, launched: Any) -> StepResult: ...


class StepBench:
    """Times steps of an executor and leaves its table as it was.

    What the pool holds does not matter to the time, but its memory must be there: pages that were
    never written all read as one page of zeros, and from the cache.

    Args:
        num_blocks: that sequences may have; all of the pool's if left out.
    """

    def __init__(
        self, executor: Engine, stopwatch: Stopwatch, num_blocks: int | None = None
    ) -> None:
        self._executor = executor
        self._stopwatch = stopwatch
        all_blocks, _, _, _, self._block_size, _ = executor.exchange.pool.shape
        self._num_blocks = num_blocks or all_blocks
        self._random = random.Random(0)
        vocabulary = range(executor.num_token_ids)
        self._tokens = tuple(self._random.choices(vocabulary, k=executor.max_context_tokens))

    def served_ms(self, step: StepShape) -> float:
        """As a service pays for it: a step alone; a decode at the distance of the steps that follow
        each other, where several of a sequence are under way at a time."""
        if step.num_prompts or self._executor.max_in_flight == 1:
            return self.step_ms(step)
        return self.following_ms(step, self._executor.max_in_flight)

    def step_ms(self, step: StepShape) -> float:
        """Milliseconds of one step in which every row draws; entering and leaving the table is not
        part of it."""
        rows = _rows(step)
        _run(self._executor, self._entry(rows))
        with self._stopwatch:
            _run(self._executor, _plan(1, rows))
        _run(self._executor, StepPlan(step_id=2, removed=tuple(range(len(rows)))))
        return self._stopwatch.ms

    def interval_ms(self, step: StepShape, num_steps: int, in_flight: int) -> float:
        """Milliseconds from the end of one step to that of the next, where so many are under way
        at a time: the median of a few. Each step is of sequences of its own, as the micro-batches
        of a pipeline are."""
        rows = _rows(step)
        _run(self._executor, self._entry(rows * num_steps))
        plans = [_plan(step_id, rows, first=step_id * len(rows)) for step_id in range(num_steps)]
        ended_s = self._ends(plans, in_flight)
        everybody = tuple(range(num_steps * len(rows)))
        _run(self._executor, StepPlan(step_id=num_steps, removed=everybody))
        return 1000 * statistics.median(b - a for a, b in itertools.pairwise(ended_s))

    def following_ms(self, step: StepShape, in_flight: int) -> float:
        """The same of decodes where each step's input is what the one before draws; the last of
        them has the step's context."""
        num_steps = min(NUM_FOLLOWING, step.context)
        first = step._replace(context=step.context - num_steps + 1)
        rows = _rows(first)
        _run(self._executor, self._entry(rows, growth=num_steps - 1))
        plans = [_plan(step_id, rows) for step_id in range(num_steps)]
        ended_s = self._ends(plans, in_flight)
        _run(self._executor, StepPlan(step_id=num_steps, removed=tuple(range(len(rows)))))
        return 1000 * statistics.median(b - a for a, b in itertools.pairwise(ended_s))

    def _ends(self, plans: Sequence[StepPlan], in_flight: int) -> list[float]:
        """When each has ended. What was drawn is told by the next plan, as a leader does."""
        under_way: deque[Any] = deque()
        drawn: tuple[DrawnToken, ...] = ()
        ended_s = []
        for plan in plans:
            if len(under_way) == in_flight:
                drawn = _drawn(self._executor.collect(under_way.popleft()))
                ended_s.append(time.perf_counter())
            told = StepPlan(step_id=plan.step_id, rows=plan.rows, drawn=drawn)
            under_way.append(self._executor.launch(told))
            drawn = ()
        for launched in under_way:
            self._executor.collect(launched)
            ended_s.append(time.perf_counter())
        return ended_s

    def _entry(self, rows: list[tuple[int, int]], growth: int = 0) -> StepPlan:
        """Sequences of so many tokens, all but the new ones computed, in scattered blocks with
        room for `growth` more."""
        needs = [blocks_for(total + growth, self._block_size) for total, _ in rows]
        scattered = iter(self._random.sample(range(self._num_blocks), sum(needs)))
        return StepPlan(
            step_id=0,
            added=tuple(
                NewSequence(s, (0,), self._tokens[:total], (), total - num_new, GREEDY)
                for s, (total, num_new) in enumerate(rows)
            ),
            blocks=tuple(
                NewBlocks(s, tuple(next(scattered) for _ in range(need)))
                for s, need in enumerate(needs)
            ),
        )


class PullBench:
    """Times pulls into an executor's pool.

    Args:
        num_blocks: of our pool that may be pulled into, and of the peer's, which is known to the
            executor's exchange as `PEER`.
    """

    def __init__(
        self, executor: Engine, stopwatch: Stopwatch, num_blocks: int, num_peer_blocks: int
    ) -> None:
        self._executor = executor
        self._stopwatch = stopwatch
        self._num_blocks, self._num_peer_blocks = num_blocks, num_peer_blocks
        self._block_size = executor.exchange.pool.shape[4]
        self._random = random.Random(0)

    def pull_ms(self, num_tokens: int) -> float:
        """Milliseconds that a pull of one prompt takes from the step loop, to its very end."""
        need = blocks_for(num_tokens, self._block_size)
        blocks = tuple(self._random.sample(range(self._num_peer_blocks), need))
        into = tuple(self._random.sample(range(self._num_blocks), need))
        pull = Pull(KVHandle(PEER, EPOCH, 0, blocks, num_tokens), into)
        with self._stopwatch:
            _run(self._executor, StepPlan(step_id=0, pulls=(pull,)))
            while not self._executor.exchange.finished():
                time.sleep(0)  # a device copies on its own; this thread does in `begin`
        return self._stopwatch.ms


def _rows(step: StepShape) -> list[tuple[int, int]]:
    """All tokens and new tokens of each row. Decodes stand before the prompt, as the leader plans
    them."""
    decodes = [(step.context, 1)] * step.batch
    return decodes + [(step.num_cached + step.num_new, step.num_new)] * step.num_prompts


def _plan(step_id: int, rows: list[tuple[int, int]], first: int = 0) -> StepPlan:
    """A step of sequences that have entered, from that one on."""
    numbered = enumerate(rows, first)
    return StepPlan(
        step_id=step_id, rows=tuple(Row(s, num_new, True) for s, (_, num_new) in numbered)
    )


def _drawn(result: StepResult) -> tuple[DrawnToken, ...]:
    return tuple(DrawnToken(row.sequence, row.token_ids[0]) for row in result.rows)


def _run(executor: Engine, plan: StepPlan) -> None:
    executor.collect(executor.launch(plan))
