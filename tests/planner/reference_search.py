"""The search of the paper's artifact at its own semantics, to be compared with what it published.

Only for tests: it is what our simulator must not be. Prefill and decode percentiles are judged
apart; a decode batch is cut at 50,000 tokens of context, whatever the memory holds, and the rest
waits its turn; KV moves for free; each step pays 2 ms and 0.1 us per token of context on the first
stage. Written from the description of its workers and schedulers, step by step.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from planner.workload.requests import Floats, Requests

Coefficients = tuple[float, float, float]
MAX_DECODE_TOKENS = 50_000
LARGE_BATCH = 95


@dataclass(frozen=True)
class Fits:
    """Milliseconds: prefill a + b*sum(l) + c*sum(l^2); decode a + b*tokens + c*batch."""

    prefill: Coefficients
    decode_small: Coefficients
    decode_large: Coefficients

    def prefill_s(self, batch: "Batch", pp: int) -> float:
        a, b, c = self.prefill
        squares = sum(job.num_input**2 for job in batch.jobs)
        return ((a + b * batch.num_tokens + c * squares) / pp + pp) / 1000

    def decode_s(self, batch: "Batch", pp: int) -> float:
        size = len(batch.jobs)
        a, b, c = self.decode_small if size < LARGE_BATCH else self.decode_large
        return (a + b * batch.num_tokens + c * size) / pp / 1000


@dataclass(eq=False)
class Job:
    """One request: tokens decoded so far count its steps after prefill."""

    index: int
    num_input: int
    num_output: int
    num_decoded: int = 0

    @property
    def context(self) -> int:
        return self.num_input + self.num_decoded + 1


@dataclass
class Batch:
    """Jobs that step together, and their tokens: of prompts, or of contexts."""

    jobs: list[Job] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def overhead_s(self) -> float:
        """What the first stage adds to a step."""
        return (2 + 1e-4 * self.num_tokens) / 1000


@dataclass
class Machine:
    """One instance: a queue before the first stage, stages that are busy or not."""

    pp: int
    take: Callable[[deque[Job]], Batch]
    stage_s: Callable[[Batch], float]
    done: Callable[[Batch, float], None]
    queue: deque[Job] = field(default_factory=deque)
    between: list[deque[Batch]] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.between = [deque() for _ in range(self.pp)]
        self.busy = [False] * self.pp


class Reference:
    """One prefill and one decode instance, each with its (fits, pp)."""

    def __init__(
        self, prefill: tuple[Fits, int], decode: tuple[Fits, int], max_tokens: int
    ) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._turn = count()
        self._max_prefill = max_tokens
        self.prefill = Machine(
            prefill[1],
            self._take_prompts,
            lambda batch: prefill[0].prefill_s(batch, prefill[1]),
            self._prefilled,
        )
        self.decode = Machine(
            decode[1],
            _take_decodes,
            lambda batch: decode[0].decode_s(batch, decode[1]),
            self._decoded,
        )

    def run(self, requests: Requests) -> tuple[Floats, Floats]:
        """TTFT and TPOT in seconds, each float64[N]; TPOT over as many steps as output tokens."""
        self.first_s = np.zeros(len(requests))
        self.last_s = np.zeros(len(requests))
        lengths = zip(requests.input_tokens, requests.output_tokens, strict=True)
        for index, (num_input, num_output) in enumerate(lengths):
            job = Job(index, int(num_input), int(num_output))
            self._at(float(requests.arrival_s[index]), partial(self._arrive, job))
        while self._events:
            now_s, _, action = heapq.heappop(self._events)
            action(now_s)
        ttft_s = self.first_s - requests.arrival_s
        return ttft_s, (self.last_s - self.first_s) / requests.output_tokens

    def _at(self, when_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._turn), action))

    def _arrive(self, job: Job, now_s: float) -> None:
        self.prefill.queue.append(job)
        self._advance(self.prefill, now_s)

    def _advance(self, machine: Machine, now_s: float) -> None:
        """Start whatever stage has something to do and nothing under way."""
        for stage in range(machine.pp):
            if machine.busy[stage]:
                continue
            if stage == 0:
                batch = machine.take(machine.queue)
            else:
                batch = machine.between[stage].popleft() if machine.between[stage] else Batch()
            if batch.jobs:
                machine.busy[stage] = True
                seconds = machine.stage_s(batch) + (0 if stage else batch.overhead_s)
                self._at(now_s + seconds, partial(self._stage_done, machine, stage, batch))

    def _stage_done(self, machine: Machine, stage: int, batch: Batch, now_s: float) -> None:
        machine.busy[stage] = False
        if stage + 1 < machine.pp:
            machine.between[stage + 1].append(batch)
        else:
            machine.done(batch, now_s)
        self._advance(machine, now_s)

    def _take_prompts(self, queue: deque[Job]) -> Batch:
        batch = Batch()
        while queue and batch.num_tokens + queue[0].num_input <= self._max_prefill:
            batch.num_tokens += queue[0].num_input
            batch.jobs.append(queue.popleft())
        return batch

    def _prefilled(self, batch: Batch, now_s: float) -> None:
        for job in batch.jobs:
            self.first_s[job.index] = now_s
            self.decode.queue.append(job)
        self._advance(self.decode, now_s)

    def _decoded(self, batch: Batch, now_s: float) -> None:
        for job in batch.jobs:
            job.num_decoded += 1
            if job.num_decoded >= job.num_output:
                self.last_s[job.index] = now_s
            else:
                self.decode.queue.append(job)


def _take_decodes(queue: deque[Job]) -> Batch:
    batch = Batch()
    while queue and batch.num_tokens + (context := queue[0].context) <= MAX_DECODE_TOKENS:
        batch.num_tokens += context
        batch.jobs.append(queue.popleft())
    return batch


def bisect_rate(passes: Callable[[float], bool], highest: float = 5.0, step: float = 0.25) -> float:
    """Its bisection over the rate per GPU: the last rate that passed when `step` is reached."""
    low, high, best = 0.0, highest, 0.0
    while high - low > step:
        rate = (low + high) / 2
        if passes(rate):
            low = best = rate
        else:
            high = rate
    return best
