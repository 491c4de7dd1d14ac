"""A prefill instance: prompts in the policy's steps, through its stages, held until pulled."""

import heapq
from collections.abc import Callable
from math import inf

from ipc.prefill_policy import FirstComeFirstServed, Turn, prefill_queue
from planner.latency.interface import LatencyModel
from planner.simulator.passage import Agenda, Passage, Record, chunk_of
from planner.simulator.service import InstanceModel, Service


class PrefillEngine:
    """The leaders' own queue says who is next. A step enters when the first stage is free, and no
    more are under way than there are stages, or waits for it behind one other step where leaders
    plan ahead; blocks stay taken from a prompt's first chunk until it is pulled: prefill memory is
    the buffer between the phases."""

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
        self._plans_ahead = model.plans_ahead
        self._leader_computes = model.leader_computes
        self._num_under_way = 0
        self._step_s = service.overheads.prefill_step_s
        self._agenda = agenda
        self._record = record
        self._on_prefilled = on_prefilled
        self._queue: FirstComeFirstServed[Passage] = prefill_queue(model.limits)
        self._free = model.kv_blocks
        self._releases: list[tuple[float, int]] = []  # a heap: blocks that come back, and when
        self._stage_free_s = [0.0] * model.latency.num_stages
        self._weights = _weights(model.latency)
        self._following_s = -inf  # the last wake-up asked for

    def arrive(self, now_s: float, passage: Passage) -> None:
        self.queued_tokens += passage.num_tokens
        self._queue.join(passage.ticket)
        self._go_on(now_s)

    def release(self, passage: Passage, when_s: float) -> None:
        """Its blocks are free from then on: pulled, or ended by the first token."""
        heapq.heappush(self._releases, (when_s, passage.blocks))
        if self._queue:
            earliest_s = when_s if self._plans_ahead else max(when_s, self._stage_free_s[0])
            self._agenda.add(earliest_s, self._wake, None)

    def _may_start(self, now_s: float) -> bool:
        if self._plans_ahead and self._num_under_way == 1:
            return True
        has_place = self._num_under_way < len(self._stage_free_s)
        return has_place and self._stage_free_s[0] <= now_s

    def _wake(self, now_s: float, _: None) -> None:
        if self._queue and self._may_start(now_s):
            self._start(now_s)

    def _go_on(self, now_s: float) -> None:
        """Somebody waits: start now if that may be, else when the first stage is free."""
        if self._may_start(now_s):
            self._start(now_s)
        else:
            self._follow(now_s)

    def _start(self, now_s: float) -> None:
        """Run the next step, if anything fits."""
        releases = self._releases
        while releases and releases[0][0] <= now_s:
            self._free += heapq.heappop(releases)[1]
        turns = self._queue.next_step(free_blocks=self._free, free_places=self._limits.max_batch)
        if turns:
            self._launch(turns, now_s)
        elif releases:
            self._agenda.add(releases[0][0], self._wake, None)

    def _launch(self, turns: list[Turn[Passage]], now_s: float) -> None:
        chunks = [chunk_of(turn) for turn in turns]
        stage_s = self._latency.prefill(chunks).seconds
        begin_s = max(now_s, self._stage_free_s[0])
        starts_s = self._record.prefill_start_s
        for (ticket, _), chunk in zip(turns, chunks, strict=True):
            passage = ticket.subject
            if chunk.num_cached:
                continue
            self._free -= passage.blocks
            if passage.is_first:
                starts_s[passage.index] = begin_s
        self._num_under_way += 1
        self._agenda.add(self._through_stages(now_s, stage_s), self._done, turns)
        if self._queue:
            self._follow(now_s)

    def _follow(self, now_s: float) -> None:
        """The next batch enters behind the running one; with one stage its end says when."""
        free_s = self._stage_free_s[0]
        if self._plans_ahead and self._num_under_way == 1:
            self._agenda.add(now_s, self._wake, None)
        elif len(self._stage_free_s) > 1 and self._following_s < free_s:
            self._following_s = free_s
            self._agenda.add(free_s, self._wake, None)

    def _through_stages(self, now_s: float, stage_s: float) -> float:
        """When a batch that enters now has left the last stage."""
        clock_s = now_s + self._step_s
        stages = self._stage_free_s
        for stage, (free_s, weight) in enumerate(zip(stages, self._weights, strict=True)):
            clock_s = max(clock_s, free_s) + weight * stage_s
            stages[stage] = clock_s
        return clock_s

    def _done(self, now_s: float, turns: list[Turn[Passage]]) -> None:
        if self._leader_computes and self._stage_free_s[0] > now_s:
            self._agenda.add(self._stage_free_s[0], self._done, turns)
            return
        self._num_under_way -= 1
        for ticket, num_new in turns:
            self.queued_tokens -= num_new
            if ticket.prompt.num_tokens:
                self._queue.rejoin(ticket)
                continue
            passage = ticket.subject
            passage.source = self
            self._on_prefilled(now_s, passage)
        if self._queue:
            self._go_on(now_s)


def _weights(latency: LatencyModel) -> list[float]:
    """Each stage's time over the mean one's. The slowest is the first: the cut leaves the last one
    fewer layers for the head, which costs next to nothing where each prompt has one row of it."""
    num_others = latency.num_stages - 1
    if not num_others:
        return [1.0]
    slowest = latency.slowest.prefill
    return [slowest, *[(latency.num_stages - slowest) / num_others] * num_others]
