"""A colocated instance: the same pool prefills and decodes, and its steps do one or both.

Prefill-first runs waiting prompts while the decodes stand still, as the paper's vLLM did;
chunked fills a token budget with the decodes and parts of prompts (Sarathi, DeepSpeed-MII).
Chunks may also follow vLLM's rules of admission and preemption (`MixedRules`).
"""

from collections.abc import Callable

from ipc.kv_layout import blocks_for
from ipc.prefill_policy import FirstComeFirstServed, Turn, prefill_queue
from planner.simulator.chunks import Started
from planner.simulator.decode import DecodePool
from planner.simulator.mixed_lane import MixedLane
from planner.simulator.passage import Agenda, Passage, Record, chunk_of
from planner.simulator.service import InstanceModel, Service
from planner.simulator.vllm import PrefixMemory, latest_arrival


class MixedInstance(DecodePool):
    """Prefill dispatch sees a queue; the decode side sees prompts that are there already."""

    lane_type = MixedLane
    lanes: list[MixedLane]  # type: ignore[assignment]

    def __init__(
        self,
        service: Service,
        model: InstanceModel,
        agenda: Agenda,
        record: Record,
        *,
        on_preempted: Callable[[float, Passage], None],
    ) -> None:
        super().__init__(service, model, agenda, record, on_preempted=on_preempted)
        self.queued_tokens = 0
        self.chunk_tokens = model.chunk_tokens
        self.queue: FirstComeFirstServed[Passage] = prefill_queue(model.limits)
        self.arriving: list[tuple[float, Passage]] = []  # not yet seen by whoever plans
        self._rules = model.rules
        self._sees_late = model.plans_ahead or model.rules.are_vllms
        self._num_computing = 0  # prompts that have begun, and do not decode yet
        self._late_blocks = self._late_places = 0
        self._memory = PrefixMemory(model.kv_blocks)

    def arrive(self, now_s: float, passage: Passage) -> None:
        """A prompt to prefill here; an idle lane takes it now, else the next to end a step."""
        self.queued_tokens += passage.num_tokens
        idle = [lane for lane in self.lanes if lane.is_idle]
        is_new = passage.is_first or not self._rules.are_vllms
        if self._sees_late and is_new and not idle:
            self.arriving.append((now_s, passage))
            for lane in self.lanes:
                if not lane.is_prefilling:
                    lane.stop_for_arrival(now_s)
            return
        self.queue.join(passage.ticket)
        if idle:
            idle[0].plan(now_s)
        else:
            self.stop_others(None, now_s)

    @property
    def num_sequences(self) -> int:
        return super().num_sequences - self._num_computing

    @property
    def preempts_prompts(self) -> bool:
        """A prompt that is not yet computed may be put out, and then nobody enters."""
        return self._rules.are_vllms

    def latest_arrival(self, began_s: float, ended_s: float) -> float:
        """Who may enter after a step from `began_s` to `ended_s`."""
        if self.plans_ahead:
            return began_s
        return latest_arrival(self._rules, began_s, ended_s)

    def welcome(self, latest_s: float) -> None:
        """Those who came by then wait from now on."""
        while self.arriving and self.arriving[0][0] <= latest_s:
            ticket = self.arriving.pop(0)[1].ticket
            enter = self.queue.rejoin if ticket.has_begun else self.queue.join
            enter(ticket)

    def set_aside(self, num_blocks: int, num_places: int) -> None:
        """What the plan of the step that begins now could not know to be free."""
        self._late_blocks, self._late_places = num_blocks, num_places

    def put_back(self, passage: Passage, num_computed: int) -> None:
        """Preempt a prompt that was being computed: it waits again."""
        self.queued_tokens += num_computed
        self.free += passage.blocks
        self.num_admitted -= 1
        self._num_computing -= 1
        self.record.num_preemptions += 1
        self._memory.freed(passage.blocks)
        num_full = num_computed // self.block_size
        self._memory.leave(passage.index, passage.blocks, num_full, self.free)
        self.queue.join(passage.ticket)

    def ended(self, passage: Passage, now_s: float) -> None:
        super().ended(passage, now_s)
        self._memory.freed(blocks_for(passage.num_tokens + passage.remaining, self.block_size))

    def preempted(self, passage: Passage, num_drawn: int, now_s: float) -> None:
        super().preempted(passage, num_drawn, now_s)
        num_computed = passage.num_tokens + num_drawn
        num_blocks = blocks_for(num_computed, self.block_size)
        self._memory.freed(num_blocks)
        if self._rules.are_vllms:
            num_full = num_computed // self.block_size
            self._memory.leave(passage.index, num_blocks, num_full, self.free)

    def stop_others(self, planning: MixedLane | None, now_s: float) -> None:
        """What waits is for whichever lane ends a step next."""
        for lane in self.lanes:
            if lane is not planning and lane.is_running and not lane.is_prefilling:
                lane.stop_from(now_s)

    def next_batch(self, now_s: float) -> list[Turn[Passage]]:
        """What the queue gives out for a step of prompts alone; their blocks are reserved."""
        turns = self.queue.next_step(
            free_blocks=self.room(now_s) - self._late_blocks - self._late_places,
            free_places=self._max_batch - self.num_admitted - self._late_places,
        )
        for turn in turns:
            if not chunk_of(turn).num_cached:
                self._start(turn.ticket.subject, now_s)
        return turns

    def computed(self, lane: MixedLane, turns: list[Turn[Passage]], now_s: float) -> list[Passage]:
        """A lane's step of prompts alone is over. Returns those that are done; others wait again,
        for a lane that is idle or for this one."""
        done = [ticket.subject for ticket, _ in turns if not ticket.prompt.num_tokens]
        for ticket, num_new in turns:
            self.queued_tokens -= num_new
            if ticket.prompt.num_tokens and self.plans_ahead:
                self.arriving.append((now_s, ticket.subject))
            elif ticket.prompt.num_tokens:
                self.queue.rejoin(ticket)
                idle = [other for other in self.lanes if other is not lane and other.is_idle]
                if idle:
                    idle[0].plan(now_s)
        return done

    def next_one(self, now_s: float) -> Started | None:
        """The head of the queue, if it has room."""
        ticket = self.queue.head
        if ticket is None or not self._may_enter(ticket.subject, now_s):
            return None
        if not self._had_room(ticket.subject):
            return None
        self.queue.leave(ticket)
        passage = ticket.subject
        num_cached = self._memory.find(passage.index, self.free) * self.block_size
        self.queued_tokens -= num_cached
        self._start(passage, now_s)
        return Started(passage, num_cached)

    def prefilled(self, lane: MixedLane, passage: Passage, now_s: float) -> None:
        """Its first token is drawn; it goes on in the lane that computed it."""
        self._num_computing -= 1
        self.used_blocks += passage.blocks
        passage.remaining -= 1
        if passage.is_first:
            self.record.first_token(passage.index, now_s, self.overheads.token_s)
        if passage.remaining and self.plans_ahead:
            lane.expect(passage, now_s)
        elif passage.remaining:
            lane.join(passage, now_s)
        else:
            self.free += passage.blocks
            self.ended(passage, now_s)

    def _room(self, free_blocks: int) -> int:
        """Those that decode may grow; prompts that are computed have all their blocks."""
        if self._rules.are_vllms:
            return free_blocks
        num_running = self.num_admitted - self._num_computing
        return self._admission.room(free_blocks=free_blocks, num_running=num_running)

    def _had_room(self, passage: Passage) -> bool:
        """Also as the step was planned."""
        if not self._late_blocks:
            return True
        left = self._room(self.free) - self._late_blocks - self._late_places
        return passage.blocks <= left and self.num_admitted + self._late_places < self._max_batch

    def _start(self, passage: Passage, now_s: float) -> None:
        self.take(passage.blocks, now_s)
        self.num_admitted += 1
        self._num_computing += 1
        if passage.is_first:
            self.record.prefill_start_s[passage.index] = now_s
