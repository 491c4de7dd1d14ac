"""A colocated instance: the same pool prefills and decodes, and its steps do one or both.

Prefill-first runs waiting prompts while the decodes stand still, as the paper's vLLM did;
chunked fills a token budget with the decodes and parts of prompts (Sarathi, DeepSpeed-MII).
Chunks may also follow vLLM's rules of admission and preemption (`MixedRules`).
"""

from collections.abc import Callable, Sequence
from math import inf, nextafter

from ipc.kv_layout import blocks_for
from ipc.prefill_policy import FirstComeFirstServed, Turn, prefill_queue
from planner.latency.interface import Chunk
from planner.simulator.decode import DecodePool
from planner.simulator.lane import Lane
from planner.simulator.passage import Agenda, Passage, Record, chunk_of
from planner.simulator.service import InstanceModel, Service
from planner.simulator.vllm import PrefixMemory, latest_arrival


class _Started:
    """A prompt that a lane computes in chunks."""

    __slots__ = ("num_computed", "num_new", "passage")

    def __init__(self, passage: Passage, num_computed: int = 0) -> None:
        self.passage = passage
        self.num_computed = num_computed
        self.num_new = 0  # in the running step

    @property
    def remaining(self) -> int:
        return self.passage.num_tokens - self.num_computed


class MixedLane(Lane):
    """A lane whose steps may compute prompts. `is_running` covers runs of decode steps alone."""

    pool: "MixedInstance"

    def __init__(self, pool: "MixedInstance") -> None:
        super().__init__(pool)
        self.is_prefilling = False
        self._began_s = 0.0  # the last step that ended
        self._batch: list[Turn[Passage]] = []
        self._started: list[_Started] = []

    @property
    def load(self) -> int:
        return super().load + len(self._batch) + len(self._started)

    @property
    def is_idle(self) -> bool:
        return not self.is_running and not self.is_prefilling

    def leave(self, now_s: float) -> None:
        super().leave(now_s)
        self.is_prefilling = False
        batch, self._batch = self._batch, []
        for passage in [*self.pool.computed(self, batch, now_s), *self._take_chunks()]:
            self.pool.prefilled(self, passage, now_s)

    def plan(self, now_s: float) -> None:
        self.started_s, self.num_steps = now_s, 0
        has_work = bool(self.members or self._started)
        self.pool.welcome(self._began_s if has_work else now_s, now_s)
        if self.pool.chunk_tokens is not None:
            seconds = self._chunked_step(now_s, self.pool.chunk_tokens)
        else:
            seconds = self._prompts_alone(now_s)
        if seconds is None:
            super().plan(now_s)
        else:
            self.is_prefilling = True
            self._wake(now_s + seconds + self.pool.overheads.prefill_step_s)
        if self.pool.queue:
            self.pool.stop_others(self, now_s)

    def stop_for_arrival(self, now_s: float) -> None:
        """End the run at the boundary at which one who arrives now may enter."""
        num_steps = min(self._steps_until(now_s), self.num_steps)
        end_s = self.boundary(num_steps)
        is_in_time = now_s <= self.pool.latest_arrival(self.boundary(num_steps - 1), end_s)
        self.stop_from(now_s if is_in_time else nextafter(end_s, inf))

    def _settle(self, now_s: float) -> None:
        num_steps = max(0, self.num_steps - 1)
        self._began_s = self.started_s if self.is_prefilling else self.boundary(num_steps)
        super()._settle(now_s)

    def _longest_run(self) -> int:
        return 1 if self.pool.arriving else super()._longest_run()

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
        if is_calm or not self.pool.preempts_prompts:
            self._started += self._newcomers(now_s, budget)
        chunks = self._chunks(budget)
        if not chunks:
            self.pool.free += growth
            return None
        self.num_steps = 1 if batch else 0
        estimate = self.pool.latency.mixed(chunks, batch, context)
        return self.pool.num_lanes * estimate.seconds + batch * self.pool.overheads.decode_row_s

    def _newcomers(self, now_s: float, budget: int) -> list[_Started]:
        wanted = budget - sum(started.remaining for started in self._started)
        newcomers = []
        while wanted > 0 and (started := self.pool.next_one(now_s)) is not None:
            newcomers.append(started)
            wanted -= started.remaining
        return newcomers

    def _chunks(self, budget: int) -> list[Chunk]:
        sizes = chunk_sizes([started.remaining for started in self._started], budget=budget)
        for started, num_new in zip(self._started, sizes, strict=False):
            started.num_new = num_new
        return [
            Chunk(started.num_new, started.num_computed)
            for started in self._started
            if started.num_new
        ]

    def _take_chunks(self) -> list[Passage]:
        """The step is over. Returns the prompts that it finished."""
        for started in self._started:
            started.num_computed += started.num_new
            started.num_new = 0
        done = [started.passage for started in self._started if not started.remaining]
        self._started = [started for started in self._started if started.remaining]
        return done


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
        self._memory = PrefixMemory(model.kv_blocks)

    def arrive(self, now_s: float, passage: Passage) -> None:
        """A prompt to prefill here; an idle lane takes it now, else the next to end a step."""
        self.queued_tokens += passage.num_tokens
        idle = [lane for lane in self.lanes if lane.is_idle]
        if self._rules.are_vllms and passage.is_first and not idle:
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
    def preempts_prompts(self) -> bool:
        """A prompt that is not yet computed may be put out, and then nobody enters."""
        return self._rules.are_vllms

    def latest_arrival(self, began_s: float, ended_s: float) -> float:
        """Who may enter after a step from `began_s` to `ended_s`."""
        return latest_arrival(self._rules, began_s, ended_s)

    def welcome(self, began_s: float, now_s: float) -> None:
        """Those who came in time for what is planned after that step wait from now on."""
        while self.arriving and self.arriving[0][0] <= self.latest_arrival(began_s, now_s):
            self.queue.join(self.arriving.pop(0)[1].ticket)

    def put_back(self, passage: Passage, num_computed: int) -> None:
        """Preempt a prompt that was being computed: it waits again."""
        self.free += passage.blocks
        self.num_admitted -= 1
        self.used_blocks -= passage.blocks
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
            free_blocks=self.room(now_s), free_places=self._max_batch - self.num_admitted
        )
        for turn in turns:
            if not chunk_of(turn).num_cached:
                self._start(turn.ticket.subject, now_s)
        return turns

    def computed(self, lane: MixedLane, turns: list[Turn[Passage]], now_s: float) -> list[Passage]:
        """A lane's step of prompts alone is over. Returns those that are done; others wait again,
        for a lane that is idle or for this one."""
        done = [ticket.subject for ticket, _ in turns if not ticket.prompt.num_tokens]
        for ticket, _ in turns:
            if ticket.prompt.num_tokens:
                self.queue.rejoin(ticket)
                idle = [other for other in self.lanes if other is not lane and other.is_idle]
                if idle:
                    idle[0].plan(now_s)
        return done

    def next_one(self, now_s: float) -> _Started | None:
        """The head of the queue, if it has room."""
        ticket = self.queue.head
        if ticket is None or not self._may_enter(ticket.subject, now_s):
            return None
        self.queue.leave(ticket)
        passage = ticket.subject
        num_blocks = self._memory.find(passage.index, self.free)
        self._start(passage, now_s)
        return _Started(passage, num_blocks * self.block_size)

    def prefilled(self, lane: MixedLane, passage: Passage, now_s: float) -> None:
        """Its first token is drawn; it goes on in the lane that computed it."""
        self.queued_tokens -= passage.num_tokens
        passage.remaining -= 1
        if passage.is_first:
            self.record.first_token(passage.index, now_s, self.overheads.token_s)
        if passage.remaining:
            lane.join(passage, now_s)
        else:
            self.free += passage.blocks
            self.ended(passage, now_s)

    def _room(self, free_blocks: int) -> int:
        return free_blocks if self._rules.are_vllms else super()._room(free_blocks)

    def _start(self, passage: Passage, now_s: float) -> None:
        self.take(passage.blocks, now_s)
        self.num_admitted += 1
        self.used_blocks += passage.blocks
        if passage.is_first:
            self.record.prefill_start_s[passage.index] = now_s


def chunk_sizes(remaining: Sequence[int], *, budget: int) -> list[int]:
    """How many tokens of each prompt that has begun, in order, fill a chunked step's budget."""
    sizes: list[int] = []
    for num_tokens in remaining:
        if budget <= 0:
            break
        sizes.append(min(num_tokens, budget))
        budget -= sizes[-1]
    return sizes
