"""A decode instance: one KV pool, `num_stages` lanes over it, pulls when there is room.

Admission is the leaders' own (`DecodeAdmission`): a prompt is pulled at a step boundary when its
blocks and one growth block for each running sequence fit, in order of arrival.
"""

import bisect
from collections.abc import Callable
from math import inf, nextafter
from operator import itemgetter

from gpu_workers.batching import DecodeAdmission
from planner.latency.interface import LatencyModel, decode_pace
from planner.simulator.lane import UNBOUNDED, Lane
from planner.simulator.passage import Agenda, Passage, Record
from planner.simulator.service import InstanceModel, Service


class Link:
    """Carries one pull after the other."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0

    def carry(self, from_s: float, seconds: float) -> float:
        """When a transfer that is asked for at `from_s` begins."""
        start_s = max(from_s, self.free_s)
        self.free_s = start_s + seconds
        return start_s


class DecodePool:
    """Blocks, admission and lanes. `on_preempted` sends a passage back to prefill."""

    lane_type: type[Lane] = Lane

    def __init__(
        self,
        service: Service,
        model: InstanceModel,
        agenda: Agenda,
        record: Record,
        *,
        on_preempted: Callable[[float, Passage], None],
    ) -> None:
        self.latency: LatencyModel = model.latency
        self.overheads = service.overheads
        self.block_size = service.block_size
        self.agenda = agenda
        self.record = record
        self.num_blocks = self.free = model.kv_blocks
        self.num_lanes = model.latency.num_stages
        self._paces = [decode_pace(model.latency, n) for n in range(self.num_lanes + 1)]
        self._is_even = set(self._paces) == {1.0}
        self.max_skip = UNBOUNDED
        self.plans_ahead = model.plans_ahead
        self.link = Link()
        self.used_blocks = 0  # as the daemon mirrors them: at hand-over, until the end
        self.num_admitted = 0
        self._max_batch = model.limits.max_batch
        self._stalls = service.pull_stalls_decode
        self._on_preempted = on_preempted
        self._admission = DecodeAdmission(model.kv_blocks)
        self._pending: list[Passage] = []
        self.lanes = [self.lane_type(self) for _ in range(self.num_lanes)]

    def pace(self) -> float:
        """How much longer than alone a step of a lane takes that begins to run now: all that run
        pass the slowest stage in turn."""
        return 1.0 if self._is_even else self._paces[sum(x.is_running for x in self.lanes) + 1]

    def keep_pace(self, now_s: float) -> None:
        """A lane has begun to run, or has come to rest: others' steps take longer from here on,
        or less."""
        if self._is_even:
            return
        running = [lane for lane in self.lanes if lane.is_running]
        for lane in running:
            if lane.pace != self._paces[len(running)]:
                lane.stop_from(now_s)

    @property
    def num_sequences(self) -> int:
        return self.num_admitted + len(self._pending)

    def room(self, now_s: float) -> int:
        """Blocks that newcomers may take now: what runs have taken in advance is still free."""
        ahead = sum(lane.ahead(now_s) for lane in self.lanes if lane.is_running)
        return self._room(self.free + ahead)

    def offer(self, now_s: float, passage: Passage) -> None:
        """A finished prefill waits to be pulled, from the next step boundary on."""
        bisect.insort(self._pending, passage)
        boundaries = [(lane.next_boundary(now_s), lane) for lane in self.lanes if not lane.is_idle]
        if not boundaries:
            self.admit(now_s)
            return
        boundary_s, lane = min(boundaries, key=itemgetter(0))
        if not self._stalls:
            self.admit(boundary_s)  # nothing else happens until then
        elif self._may_enter(self._pending[0], boundary_s):
            lane.stop_from(now_s)

    def at_boundary(self, lane: Lane, now_s: float) -> None:
        """A lane's leader plans its next step."""
        if self._pending:
            lane.stall(self.admit(now_s))

    def admit(self, now_s: float) -> float:
        """Pull those at the head that there is room for. Returns seconds that stall the leader."""
        stall_s = 0.0
        while self._pending and self._may_enter(self._pending[0], now_s):
            stall_s += self._pull(self._pending.pop(0), now_s)
        return stall_s if self._stalls else 0.0

    def take(self, num_blocks: int, now_s: float) -> None:
        """Reserve blocks that `room` has promised."""
        if num_blocks > self.free:
            self.reclaim(now_s)
        self.free -= num_blocks

    def ended(self, passage: Passage, now_s: float) -> None:
        self.num_admitted -= 1
        self.used_blocks -= passage.blocks
        self.record.last_token(passage.index, now_s + self.overheads.token_s)

    def preempted(self, passage: Passage, num_drawn: int, now_s: float) -> None:
        """The next passage starts from all tokens known: the prompt and one for each draw."""
        self._admission.preempted()
        self.num_admitted -= 1
        self.used_blocks -= passage.blocks
        self.record.num_preemptions += 1
        num_tokens = passage.num_tokens + 1 + num_drawn
        again = Passage(passage.index, num_tokens, passage.remaining - num_drawn, self.block_size)
        again.is_first = False
        self.agenda.add(now_s + self.overheads.handover_s, self._on_preempted, again)

    def reclaim(self, now_s: float) -> bool:
        """Blocks that long runs hold in advance come back. False: there are none."""
        before = self.free
        for lane in self.lanes:
            if lane.is_running:
                lane.stop_from(now_s)
        return self.free > before

    def _may_enter(self, passage: Passage, now_s: float) -> bool:
        is_full = self.num_admitted > 0 and self.num_admitted >= self._max_batch
        if is_full:
            return False
        return passage.blocks <= self._room(self.free) or passage.blocks <= self.room(now_s)

    def _room(self, free_blocks: int) -> int:
        return self._admission.room(free_blocks=free_blocks, num_running=self.num_admitted)

    def _pull(self, passage: Passage, now_s: float) -> float:
        """Reserve and copy; it joins the lane with the fewest sequences when it is here."""
        assert passage.source is not None, "what is pulled lies in a prefill instance"
        seconds = self.latency.transfer(passage.num_tokens).seconds
        start_s = self.link.carry(now_s, seconds)
        end_s = start_s + seconds
        self.take(passage.blocks, now_s)
        self.num_admitted += 1
        if passage.is_first:
            self.record.pull_start_s[passage.index] = start_s
            self.record.pull_end_s[passage.index] = end_s
        passage.source.release(passage, end_s)
        lane = min(self.lanes, key=lambda lane: lane.load) if self.num_lanes > 1 else self.lanes[0]
        # What a boundary's plan pulls cannot be in that boundary's step, however fast the link.
        lane.expect(passage, max(end_s, nextafter(now_s, inf)))
        return seconds
