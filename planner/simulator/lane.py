"""One micro-batch of a decode instance: continuous batching, many steps at a time.

Between a join and the next leave nothing changes but the context, and a step's time is a line in
it (`StepLine`), so a whole run of steps is added up in closed form. A run is cut short at the
first step boundary after something happens. The result is that of taking every step.
"""

import heapq
from math import ceil, sqrt
from typing import TYPE_CHECKING

from planner.simulator.passage import Passage

if TYPE_CHECKING:
    from planner.simulator.decode import DecodePool

UNBOUNDED = 1 << 60


class Lane:
    """A batch that steps together. `num_stages` lanes of one instance share its pool.

    `started_s` is the boundary at which the present run began, `num_steps` how many steps it is
    planned for; blocks that the run will grow into are taken from the pool when it is planned.
    """

    def __init__(self, pool: "DecodePool") -> None:
        self.pool = pool
        self.incoming: list[tuple[float, Passage]] = []  # a heap by the end of the pull
        self.members: list[tuple[int, Passage]] = []  # a heap by the step of leaving
        self.num_steps = 0
        self.started_s = 0.0
        self._context_tokens = 0  # of the next step, its new tokens included
        self._step = 0
        # Members by (step - computed tokens) mod block size: those that need a block next.
        self._phases = [0] * pool.block_size
        self._first_s = self._more_s = self._stall_s = 0.0
        self.pace = 1.0  # of the present run: how much longer its steps take than alone
        self._began_s = 0.0  # the last step that ended
        self._seen_s = 0.0  # who came later is not in the step that begins now
        self._turn = 0  # of the wake-up that counts; earlier ones were overtaken

    @property
    def is_running(self) -> bool:
        return self.num_steps > 0

    @property
    def is_idle(self) -> bool:
        return not self.is_running

    @property
    def load(self) -> int:
        return len(self.members) + len(self.incoming)

    # ---- what comes in ----------------------------------------------------------------------

    def expect(self, passage: Passage, ready_s: float) -> None:
        """It joins at the first step boundary from `ready_s` on."""
        heapq.heappush(self.incoming, (ready_s, passage))
        if self.is_idle:
            self._wake(self.incoming[0][0])
        else:
            self.stop_from(ready_s)

    def stall(self, seconds: float) -> None:
        """The next run's first step is so much longer: its leader copies before it computes."""
        self._stall_s += seconds

    def join(self, passage: Passage, now_s: float) -> None:
        """Enter the batch; the caller plans the next run."""
        computed = passage.num_tokens
        passage.leave_step = self._step + passage.remaining
        heapq.heappush(self.members, (passage.leave_step, passage))
        self._context_tokens += computed + 1
        self._phases[(self._step - computed) % self.pool.block_size] += 1
        if passage.is_first:
            self.pool.record.decode_start_s[passage.index] = now_s

    # ---- runs -------------------------------------------------------------------------------

    def boundary(self, num_steps: int) -> float:
        """When so many steps of the present run are done."""
        if num_steps == 0:
            return self.started_s
        more = self._more_s * (num_steps * (num_steps - 1) // 2)
        return self.started_s + self._stall_s + num_steps * self._first_s + more

    def next_boundary(self, when_s: float) -> float:
        """The first one from `when_s` on, within the present run."""
        return self.boundary(min(self._steps_until(when_s), self.num_steps))

    def ahead(self, when_s: float) -> int:
        """Blocks that the run has taken for steps that begin at `when_s` or later."""
        num_steps = self._steps_until(when_s)
        if num_steps >= self.num_steps:
            return 0
        return self._growth(self.num_steps) - self._growth(num_steps)

    def stop_from(self, when_s: float) -> None:
        """End the run at the first boundary from `when_s` on, if it would go on beyond."""
        num_steps = self._steps_until(when_s)
        if num_steps < self.num_steps:
            self.pool.free += self._growth(self.num_steps) - self._growth(num_steps)
            self.num_steps = num_steps
            self._wake(self.boundary(num_steps))

    def due(self, now_s: float, turn: int) -> None:
        """The agenda's call: the planned run is over, or an idle lane's pull is."""
        if turn != self._turn:
            return
        self._began_s = self._last_began_s()
        self._settle(now_s)
        self.leave(now_s)
        self._seen_s = self._planned_s(now_s) if self.pool.plans_ahead else now_s
        while self.incoming and self.incoming[0][0] <= self._seen_s:
            self.join(heapq.heappop(self.incoming)[1], now_s)
        self.pool.at_boundary(self, now_s)
        self.plan(now_s)

    def leave(self, now_s: float) -> None:
        """Those whose last token the last step drew."""
        members = self.members
        while members and members[0][0] <= self._step:
            passage = heapq.heappop(members)[1]
            self._forget(passage, passage.remaining)
            self.pool.ended(passage, now_s)

    def plan(self, now_s: float) -> None:
        """Begin the next run at this boundary."""
        self.started_s = now_s
        self.num_steps = 0
        num_preempted = self.pool.record.num_preemptions
        if self._make_room(now_s):
            # What a preemption frees is offered at the next boundary.
            is_calm = self.pool.record.num_preemptions == num_preempted
            self._run(self._longest_run() if is_calm else 1)
            self.pool.keep_pace(now_s)
            return
        self.pool.keep_pace(now_s)
        self._stall_s = 0.0  # copies hold up nobody here: who comes next joins when they are over
        if self.incoming:
            self._wake(self.incoming[0][0])

    def preempt(self, passage: Passage, now_s: float) -> None:
        """Put a member out; what it has drawn so far becomes part of its prompt."""
        self.members.remove((passage.leave_step, passage))
        heapq.heapify(self.members)
        num_drawn = passage.remaining - (passage.leave_step - self._step)
        self._forget(passage, num_drawn)
        self.pool.preempted(passage, num_drawn, now_s)

    def _last_began_s(self) -> float:
        """When the last step of the run that ends now began."""
        return self.boundary(max(0, self.num_steps - 1))

    def _planned_s(self, now_s: float) -> float:
        """When the step that begins now was planned: as the last one began, if there was more to
        do then."""
        return self._began_s if self._has_members_by(self._began_s) else now_s

    def _has_members_by(self, when_s: float) -> bool:
        """Now that those who are done have left: whether others were here already."""
        return bool(self.members or (self.incoming and self.incoming[0][0] <= when_s))

    def _run(self, num_steps: int) -> None:
        """Take `num_steps` from here, fewer where the line ends or somebody comes in."""
        pool, batch, context = self.pool, len(self.members), self._context_tokens
        line = pool.latency.decode(batch, context)
        num_lanes, costs = pool.num_lanes, pool.overheads
        self.pace = pace = pool.pace()
        step_s = pace * num_lanes * (line.base_s + line.per_token_s * context)
        self._first_s = step_s + costs.decode_step_s + costs.decode_row_s * batch
        self._more_s = pace * num_lanes * line.per_token_s * batch
        if line.until_tokens < context + batch * num_steps:
            num_steps = min(num_steps, int((line.until_tokens - context) // batch) + 1)
        if self.incoming:
            num_steps = min(num_steps, self._steps_until(self.incoming[0][0]))
        self.num_steps = num_steps
        pool.free -= self._growth(num_steps)
        self._wake(self.boundary(num_steps))

    def _longest_run(self) -> int:
        """Until somebody leaves, or blocks lack."""
        num_steps = min(self.members[0][0] - self._step, self.pool.max_skip)
        free = self.pool.free
        if len(self.members) * (num_steps // self.pool.block_size + 1) <= free:
            return num_steps
        low, high = 1, num_steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._growth(middle) <= free else (low, middle - 1)
        return low

    def _make_room(self, now_s: float) -> bool:
        """Blocks for one more step, by preemption of the youngest; False when nobody is left."""
        while self.members and self._growth(1) > self.pool.free:
            if not self.pool.reclaim(now_s):
                self.preempt(max(passage for _, passage in self.members), now_s)
        return bool(self.members)

    def _settle(self, now_s: float) -> None:
        """The run's steps have been taken."""
        self._step += self.num_steps
        self._context_tokens += self.num_steps * len(self.members)
        if self.num_steps:
            self._stall_s = 0.0
        self.num_steps = 0
        self.started_s = now_s

    def _forget(self, passage: Passage, num_drawn: int) -> None:
        computed = passage.num_tokens + num_drawn
        self._context_tokens -= computed + 1
        self._phases[(self._step - computed) % self.pool.block_size] -= 1
        self.pool.free += -(-computed // self.pool.block_size)

    def _growth(self, num_steps: int) -> int:
        """Blocks that the members need for so many steps from here."""
        size = self.pool.block_size
        rounds, rest = divmod(num_steps, size)
        start = self._step % size
        wanted = self._phases[start : start + rest]
        if start + rest > size:
            wanted = wanted + self._phases[: start + rest - size]
        return rounds * len(self.members) + sum(wanted)

    def _steps_until(self, when_s: float) -> int:
        """Steps of the present run up to the first boundary from `when_s` on; at least one."""
        wait_s = when_s - self.started_s - self._stall_s
        if wait_s <= self._first_s:
            return 1
        first_s, more_s = self._first_s, self._more_s
        half = first_s - more_s / 2
        if more_s * wait_s < 1e-9 * half * half:  # as good as constant steps
            num_steps = ceil(wait_s / first_s)
        else:
            num_steps = ceil((sqrt(half * half + 2 * more_s * wait_s) - half) / more_s)
        if self.boundary(num_steps) < when_s:
            return num_steps + 1
        if num_steps > 1 and self.boundary(num_steps - 1) >= when_s:
            return num_steps - 1
        return num_steps

    def _wake(self, when_s: float) -> None:
        self._turn += 1
        self.pool.agenda.add(when_s, self.due, self._turn)
