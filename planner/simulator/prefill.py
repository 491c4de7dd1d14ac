"""A prefill instance: prompts packed to L_m, through its pipeline stages, held until pulled."""

import bisect
import heapq
from collections.abc import Callable
from math import inf

from gpu_workers.batching import pack_prefill
from planner.latency.interface import Chunk
from planner.simulator.passage import Agenda, Passage, Record
from planner.simulator.service import InstanceModel, Service


class PrefillEngine:
    """First come, first served. A batch enters when the first stage is free; its prompts' blocks
    stay taken until they are pulled: prefill memory is the buffer between the phases."""

    def __init__(
        self,
        service: Service,
        model: InstanceModel,
        agenda: Agenda,
        record: Record,
        *,
        on_prefilled: Callable[[float, Passage], None],
    ) -> None:
        self.queued_tokens = 0  # the running ones included
        self.num_sequences = 0  # decoded here: none
        self._latency = model.latency
        self._limits = model.limits
        self._step_s = service.overheads.prefill_step_s
        self._agenda = agenda
        self._record = record
        self._on_prefilled = on_prefilled
        self._waiting: list[Passage] = []
        self._free = model.kv_blocks
        self._releases: list[tuple[float, int]] = []  # a heap: blocks that come back, and when
        self._stage_free_s = [0.0] * model.latency.num_stages
        self._following_s = -inf  # the last wake-up asked for

    def arrive(self, now_s: float, passage: Passage) -> None:
        self.queued_tokens += passage.num_tokens
        waiting = self._waiting
        if waiting and passage < waiting[-1]:
            bisect.insort(waiting, passage)
        else:
            waiting.append(passage)
        if self._stage_free_s[0] <= now_s:
            self._start(now_s)
        else:
            self._follow()

    def release(self, passage: Passage, when_s: float) -> None:
        """Its blocks are free from then on: pulled, or ended by the first token."""
        heapq.heappush(self._releases, (when_s, passage.blocks))
        if self._waiting:
            self._agenda.add(max(when_s, self._stage_free_s[0]), self._wake, None)

    def _wake(self, now_s: float, _: None) -> None:
        if self._waiting and self._stage_free_s[0] <= now_s:
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        """Run the next batch, if one fits."""
        releases = self._releases
        while releases and releases[0][0] <= now_s:
            self._free += heapq.heappop(releases)[1]
        count = pack_prefill(
            (passage.waiting for passage in self._waiting),
            max_tokens=self._limits.prefill_tokens,
            free_blocks=self._free,
            free_places=self._limits.max_batch,
        )
        if count:
            batch = self._waiting[:count]
            del self._waiting[:count]
            self._launch(batch, now_s)
        elif releases:
            self._agenda.add(releases[0][0], self._wake, None)

    def _launch(self, batch: list[Passage], now_s: float) -> None:
        chunks = [Chunk(passage.num_tokens) for passage in batch]
        stage_s = self._latency.prefill(chunks).seconds
        starts_s = self._record.prefill_start_s
        for passage in batch:
            self._free -= passage.blocks
            if passage.is_first:
                starts_s[passage.index] = now_s
        self._agenda.add(self._through_stages(now_s, stage_s), self._done, batch)
        if self._waiting:
            self._follow()

    def _follow(self) -> None:
        """The next batch enters behind the running one; with one stage its end says when."""
        free_s = self._stage_free_s[0]
        if len(self._stage_free_s) > 1 and self._following_s < free_s:
            self._following_s = free_s
            self._agenda.add(free_s, self._wake, None)

    def _through_stages(self, now_s: float, stage_s: float) -> float:
        """When a batch that enters now has left the last stage."""
        clock_s = now_s + self._step_s
        stages = self._stage_free_s
        for stage, free_s in enumerate(stages):
            clock_s = max(clock_s, free_s) + stage_s
            stages[stage] = clock_s
        return clock_s

    def _done(self, now_s: float, batch: list[Passage]) -> None:
        for passage in batch:
            self.queued_tokens -= passage.num_tokens
            passage.source = self
            self._on_prefilled(now_s, passage)
        if self._waiting and self._stage_free_s[0] <= now_s:
            self._start(now_s)
