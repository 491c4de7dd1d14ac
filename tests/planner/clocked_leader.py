"""An instance's real scheduler on a simulated clock: what the simulator must agree with.

Steps take what a latency model says, one after the other as on one device, and pulls go beside
them over one link. Up to `max_in_flight` steps are launched, in the order of the leader's loop
(plan, launch, collect); of two stages the leader computes the first one itself, as on CPU. No
engine, and no tokens that mean anything. To a decode instance prompts come prefilled, with their
first token; a preempted one is prefilled again in no time.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from gpu_workers.step_plan import PullResult, RowResult, StepPlan, StepResult
from ipc.kv_layout import blocks_for
from ipc.messages import (
    Decode,
    Event,
    MixedPolicy,
    Preempted,
    Prefill,
    Prefilled,
    SequenceStart,
    Tokens,
)
from ipc.vocabulary import KVHandle, Parallelism, Role, SamplingParams
from planner.latency.interface import Chunk
from planner.simulator.service import InstanceModel
from planner.workload.requests import Floats, Requests

BLOCK_SIZE = 16
TOKEN = (7,)


@dataclass(frozen=True)
class Served:
    """When each request had its first and its last token, float64[N]."""

    first_token_s: Floats
    last_token_s: Floats
    num_preempted: int


def serve(model: InstanceModel, requests: Requests, max_in_flight: int) -> Served:
    """By the scheduler that an instance of that model would have.

    Args:
        max_in_flight: steps, of one sequence or, where there are stages, in all.
    """
    return _Clock(model, requests, max_in_flight).served()


class _Clock:
    """Prompts are sequences 0, 1, ... and what decodes of them -1, -2, ..."""

    def __init__(self, model: InstanceModel, requests: Requests, max_in_flight: int) -> None:
        self._role, self._latency, self._requests = model.role, model.latency, requests
        self._max_in_flight = max_in_flight
        self._scheduler = Scheduler(
            Owner("here", 1),
            model.role,
            MixedPolicy(model.chunk_tokens),
            num_blocks=model.kv_blocks,
            block_size=BLOCK_SIZE,
            limits=model.limits,
            parallelism=Parallelism(1, model.latency.num_stages),
            max_in_flight=max_in_flight if model.latency.num_stages == 1 else 1,
        )
        self._now_s = self._device_free_s = self._link_free_s = 0.0
        self._under_way: deque[tuple[StepPlan, float]] = deque()  # and when each ends
        self._pulls: deque[tuple[int, float]] = deque()  # whose, and when each ends
        self._computed: dict[int, int] = {}  # tokens of each sequence
        self._drawn = [0] * len(requests)
        self._first_s, self._last_s = (np.full(len(requests), np.nan) for _ in range(2))

    def served(self) -> Served:
        arrivals = deque(enumerate(self._requests.arrival_s.tolist()))
        while np.isnan(self._last_s).any():
            while arrivals and arrivals[0][1] <= self._now_s:
                self._enter(arrivals.popleft()[0])
            self._take_pulls()
            if self._plan() and self._num_busy < self._max_in_flight:
                continue
            self._pass_time(arrivals[0][1] if arrivals else np.inf)
        return Served(self._first_s, self._last_s, self._scheduler.decodes.num_preempted)

    @property
    def _num_busy(self) -> int:
        return sum(bool(plan.rows) for plan, _ in self._under_way)

    def _pass_time(self, arrival_s: float) -> None:
        """To the end of the oldest step; while more may be launched, to whatever comes first."""
        wake_s = min([arrival_s, *(end_s for _, end_s in self._pulls)])
        listens = self._num_busy < self._max_in_flight
        if not self._under_way or (listens and wake_s < self._under_way[0][1]):
            self._now_s = max(self._now_s, wake_s)
        else:
            self._collect()

    def _enter(self, index: int) -> None:
        """Anew, or again after a preemption."""
        prompt = (1,) * int(self._requests.input_tokens[index])
        sampling = SamplingParams(
            max_tokens=int(self._requests.output_tokens[index]), seed=0, temperature=0.0
        )
        if self._role is Role.DECODE:
            if not self._drawn[index]:
                self._first_s[index] = self._requests.arrival_s[index]
            self._draw(index)
            output = TOKEN * self._drawn[index]
            num_tokens = len(prompt) + len(output) - 1
            blocks = tuple(range(blocks_for(num_tokens, BLOCK_SIZE)))
            handle = KVHandle("there", 1, index, blocks, num_tokens)
            start = SequenceStart(-1 - index, 0, output)
            self._scheduler.decode(Decode(index, index, handle, (start,), prompt, sampling))
            return
        again = TOKEN * self._drawn[index]
        self._scheduler.prefill(Prefill(index, index, (-1 - index,), (0,), prompt, again, sampling))

    def _plan(self) -> bool:
        plan = self._scheduler.plan()
        self._hear()
        if plan is None:
            return False
        self._computed |= {new.sequence: new.num_computed for new in plan.added}
        began_s = ends_s = self._now_s
        if plan.rows:
            ends_s = self._device_free_s = self._computed_by(self._seconds(plan))
        for pull in plan.pulls:
            seconds = self._latency.transfer(pull.handle.num_tokens).seconds
            self._link_free_s = max(self._link_free_s, began_s) + seconds
            self._pulls.append((pull.handle.request_id, self._link_free_s))
        self._scheduler.launched(plan, began_s)
        self._under_way.append((plan, ends_s))
        return True

    def _computed_by(self, stage_s: float) -> float:
        """When the last stage is through; the leader itself is with the first one."""
        for _ in range(self._latency.num_stages - 1):
            self._now_s += stage_s
        return max(self._now_s, self._device_free_s) + stage_s

    def _seconds(self, plan: StepPlan) -> float:
        chunks, batch, context = [], 0, 0
        for row in plan.rows:
            before = self._computed[row.sequence]
            self._computed[row.sequence] = before + row.num_new
            if row.sequence < 0:
                batch, context = batch + 1, context + before + 1
            else:
                chunks.append(Chunk(row.num_new, before))
        if not chunks:
            return self._latency.decode(batch, context).seconds(context)
        if not batch:
            return self._latency.prefill(chunks).seconds
        return self._latency.mixed(chunks, batch, context).seconds

    def _collect(self) -> None:
        plan, ends_s = self._under_way.popleft()
        self._now_s = max(self._now_s, ends_s)
        rows = tuple(RowResult(row.sequence, TOKEN) for row in plan.rows if row.draws)
        result = StepResult(plan.step_id, rows)
        self._scheduler.collect(result, started_s=self._now_s, ended_s=self._now_s)
        self._hear()

    def _take_pulls(self) -> None:
        while self._pulls and self._pulls[0][1] <= self._now_s:
            index, end_s = self._pulls.popleft()
            self._scheduler.pulled(PullResult(index, 1, end_s, end_s))
        self._hear()

    def _hear(self) -> None:
        outbox = self._scheduler.outbox
        events, outbox[:] = list(outbox), []
        for event in events:
            self._note(event)

    def _note(self, event: Event | Tokens) -> None:
        match event:
            case Prefilled(request_id=index):
                self._draw(index)
            case Tokens(rows=rows):
                for row in rows:
                    self._draw(-1 - row.seq_id)
            case Preempted(seq_id=seq_id):
                self._enter(-1 - seq_id)

    def _draw(self, index: int) -> None:
        self._drawn[index] += 1
        if np.isnan(self._first_s[index]):
            self._first_s[index] = self._now_s
        if self._drawn[index] == self._requests.output_tokens[index]:
            self._last_s[index] = self._now_s
