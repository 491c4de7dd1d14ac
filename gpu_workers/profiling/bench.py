"""Do one step or one pull and time it, as the leader of an instance pays for it.

A step is `launch` and `collect` of a plan on the executor that would serve; a pull is one between
two pools in memory files, as workers share them.
"""

import itertools
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import torch

from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.models.layers import Model
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.step_plan import (
    NewBlocks,
    NewSequence,
    Pull,
    PullResult,
    Row,
    StepPlan,
    StepResult,
)
from ipc.kv_layout import blocks_for
from ipc.vocabulary import KVHandle, SamplingParams, WorkerName

GREEDY = SamplingParams(max_tokens=1 << 30, seed=0, temperature=0.0)
PEER, EPOCH = "peer", 1
ALONE = WorkerName(PEER)


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

    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, launched: Any) -> StepResult: ...


class StepBench:
    """Times steps of an executor and leaves its table as it was.

    What the pool holds does not matter to the time, but its memory must be there: pages that were
    never written all read as one page of zeros, and from the cache.
    """

    def __init__(self, executor: Engine, stopwatch: Stopwatch) -> None:
        self._executor = executor
        self._stopwatch = stopwatch
        self._num_blocks, _, _, _, self._block_size, _ = executor.exchange.pool.shape
        self._random = random.Random(0)
        vocabulary = range(executor.num_token_ids)
        self._tokens = tuple(self._random.choices(vocabulary, k=executor.max_context_tokens))

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

    def _ends(self, plans: Sequence[StepPlan], in_flight: int) -> list[float]:
        under_way: deque[Any] = deque()
        ended_s = []
        for plan in plans:
            if len(under_way) == in_flight:
                self._executor.collect(under_way.popleft())
                ended_s.append(time.perf_counter())
            under_way.append(self._executor.launch(plan))
        for launched in under_way:
            self._executor.collect(launched)
            ended_s.append(time.perf_counter())
        return ended_s

    def _entry(self, rows: list[tuple[int, int]]) -> StepPlan:
        """Sequences of so many tokens, all but the new ones computed, in scattered blocks."""
        needs = [blocks_for(total, self._block_size) for total, _ in rows]
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
    """Times pulls into an executor's pool. See `connected`."""

    def __init__(self, executor: Engine, stopwatch: Stopwatch, num_peer_blocks: int) -> None:
        self._executor = executor
        self._stopwatch = stopwatch
        self._num_peer_blocks = num_peer_blocks
        self._num_blocks, _, _, _, self._block_size, _ = executor.exchange.pool.shape
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


@contextmanager
def connected(
    executor: Engine, exchange: CpuExchange, stopwatch: Stopwatch, num_tokens: int
) -> Iterator[PullBench]:
    """Pulls of up to `num_tokens` tokens from a second pool, which lives as long as this lasts."""
    with twin(exchange, num_tokens) as num_blocks:
        yield PullBench(executor, stopwatch, num_blocks)


@contextmanager
def twin(exchange: CpuExchange, num_tokens: int, name: WorkerName = ALONE) -> Iterator[int]:
    """A peer with our own layers and heads, known to the exchange; its number of blocks.

    Every rank of an instance makes its own: together they are a second instance of that shape.
    """
    layout = exchange.layout
    num_blocks = min(layout.num_blocks, layout.blocks_for(num_tokens))
    peer = CpuExchange(msgspec.structs.replace(layout, num_blocks=num_blocks), PEER)
    worker = msgspec.structs.replace(name, instance=PEER)
    try:
        peer.pool.fill_(1.0)
        exchange.map_peer(worker, EPOCH, peer.layout, os.dup(peer.descriptor))
        yield num_blocks
    finally:
        exchange.unmap_instance(PEER, EPOCH)
        os.close(peer.descriptor)


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


def _run(executor: Engine, plan: StepPlan) -> None:
    executor.collect(executor.launch(plan))
