"""The step loop of one instance: receive, plan, launch, collect.

The leader alone decides what its instance runs next. Up to `max_in_flight` steps are under way at
a time, collected in the order of their launch. It waits only when nothing can be planned and
nothing has ended; every command, token and pull is an event, nothing is polled by sleeping. Before
a step that may be long it says so, because it answers nobody meanwhile.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, assert_never

import msgspec

from gpu_workers.auditor import Auditor
from gpu_workers.forecast import Forecast, work_of
from gpu_workers.scheduler import Scheduler
from gpu_workers.step_plan import PullResult, StepPlan, StepResult
from ipc import journal
from ipc.kv_layout import LayoutMismatch
from ipc.messages import (
    Abort,
    Audit,
    Command,
    Decode,
    Event,
    Exit,
    PeerDown,
    PeerUp,
    Prefill,
    Release,
    Released,
    SetRole,
    Stats,
    Tokens,
)

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
PULL_LOOK_S = 0.001
LONG_S = 0.5  # no bound for a silent worker is shorter than twice that


class Link(Protocol):
    """The leader's way to the daemon."""

    def send(self, event: Event | Tokens) -> None: ...

    def receive(self, timeout_s: float | None) -> list[Command]: ...


class StepExecutor(Protocol):
    """Runs steps as plans say. `launch` may return before the device is done."""

    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, launched: Any) -> StepResult: ...


class Pulls(Protocol):
    """The leader's share in an exchange: which peers there are, and what has been pulled."""

    def knows(self, instance: str, epoch: int) -> bool: ...

    def unmap_instance(self, instance: str, epoch: int) -> None: ...

    def finished(self) -> list[PullResult]: ...


class _InFlight(msgspec.Struct, frozen=True):
    """A launched step. `until_s` is when it should have ended at the latest, if it is long."""

    launched: Any
    started_s: float
    has_rows: bool
    work: float
    until_s: float | None


class _Stopwatch:
    """Adds up the CPU seconds that this thread spends inside its `with` blocks.

    Not wall time: a core shared with others would charge their turns to us.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.thread_time() - self._began_s


class Leader:
    """Drives one executor by one scheduler, and tells the daemon.

    Args:
        executor: of this worker alone, or of all workers of the instance.
        max_in_flight: steps with rows that are under way at a time: one for each stage, or as many
            as the executor takes of one sequence.
        is_done: whether `collect` would return at once; whoever makes it false must also end
            the link's `receive` when it turns true.
        hidden_bytes: what this rank has sent to the next stage so far.
        pull_path: how this rank reads peers' pools.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        executor: StepExecutor,
        exchange: Pulls,
        map_peer: Callable[[PeerUp], None],
        *,
        max_in_flight: int = 1,
        is_done: Callable[[Any], bool] = lambda launched: True,
        hidden_bytes: Callable[[], int] = lambda: 0,
        pull_path: Callable[[], str] = lambda: "",
    ) -> None:
        self._link = link
        self._scheduler = scheduler
        self._executor = executor
        self._exchange = exchange
        self._map_peer = map_peer
        self._max_in_flight = max_in_flight
        self._is_done = is_done
        self._hidden_bytes = hidden_bytes
        self._pull_path = pull_path
        self._in_flight: deque[_InFlight] = deque()
        self._is_exiting = False
        self._control = _Stopwatch()
        self._forecast = Forecast()
        self._busy_until_s: float | None = None
        self._pulls_since_s: dict[int, float] = {}  # by request
        self._beat = 0
        self._last_step_s = 0.0
        self._auditor = Auditor(scheduler.audit)
        self._stats_due_s = 0.0
        self._stats_sent: Stats | None = None

    def run(self) -> None:
        """Until `Exit`; what is under way then is collected, so that all ranks are through."""
        while not self._is_exiting:
            has_acted = self._step()
            with self._control:
                has_acted |= self._take_pulls()
                self._report(time.monotonic(), is_idle=not has_acted and not self._in_flight)
            commands = self._link.receive(self._patience_s(has_acted=has_acted))
            with self._control:
                for command in commands:
                    self._handle(command)
        while self._in_flight:
            self._collect(self._in_flight.popleft())

    def _step(self) -> bool:
        """Launch what can be planned, collect what has ended or must end first; False if neither
        was there to do."""
        with self._control:
            plan = self._scheduler.plan()
            self._flush()
        if plan is not None:
            self._launch(plan)
        if not self._in_flight or not self._is_due(self._in_flight[0], has_more=plan is not None):
            return plan is not None
        self._collect(self._in_flight.popleft())
        return True

    def _is_due(self, oldest: _InFlight, *, has_more: bool) -> bool:
        """Whether to collect the oldest step now, waiting for it if need be."""
        num_busy = sum(step.has_rows for step in self._in_flight)
        if not oldest.has_rows or num_busy >= self._max_in_flight:
            return True
        return not has_more and self._is_done(oldest.launched)

    def _patience_s(self, *, has_acted: bool) -> float | None:
        """How long to wait for commands: not at all while there is work, for ever without any.

        The end of a copy by a device is no message, so while one is under way we look again soon.
        """
        if has_acted or self._scheduler.outbox:
            return 0
        return PULL_LOOK_S if self._scheduler.decodes.is_pulling else None

    def _launch(self, plan: StepPlan) -> None:
        started_s, work = time.monotonic(), work_of(plan)
        until_s = self._announce(work, started_s)
        self._pulls_since_s |= {pull.handle.request_id: started_s for pull in plan.pulls}
        launched = self._executor.launch(plan)
        self._scheduler.launched(plan, started_s)
        self._in_flight.append(_InFlight(launched, started_s, bool(plan.rows), work, until_s))

    def _announce(self, work: float, now_s: float) -> float | None:
        """Say until when a step may take, if it may take long."""
        longest_s = self._forecast.longest_s(work)
        if longest_s < LONG_S:
            return None
        with self._control:
            until_s = now_s + longest_s
            self._busy_until_s = max(until_s, self._busy_until_s or 0.0)
            self._send_stats(now_s)
        return until_s

    def _collect(self, step: _InFlight) -> None:
        result = self._executor.collect(step.launched)
        ended_s = time.monotonic()
        self._last_step_s = ended_s
        with self._control:
            self._learn(step, ended_s)
            self._scheduler.collect(result, started_s=step.started_s, ended_s=ended_s)
            self._take_pulls()
            self._flush()

    def _learn(self, step: _InFlight, ended_s: float) -> None:
        """What a step took; that it is over is told soon where it was announced."""
        if step.has_rows:
            self._forecast.observe(step.work, ended_s - step.started_s)
        if step.until_s is not None:
            untils = (s.until_s for s in self._in_flight if s.until_s is not None)
            self._busy_until_s = max(untils, default=None)
            self._stats_due_s = 0.0

    def _take_pulls(self) -> bool:
        pulls = self._exchange.finished()
        for pull in pulls:
            self._pulls_since_s.pop(pull.request_id, None)
            self._scheduler.pulled(pull)
        return bool(pulls)

    def _handle(self, command: Command) -> None:
        match command:
            case Prefill():
                self._scheduler.prefill(command)
            case Decode(handle=handle):
                if self._exchange.knows(handle.owner, handle.epoch):
                    self._scheduler.decode(command)
                else:
                    self._scheduler.refuse(command, f"{handle.owner} is not connected")
            case Abort():
                self._scheduler.abort(command)
            case Release(request_id):
                self._scheduler.prefills.release(request_id)
            case PeerUp():
                self._connect(command)
            case PeerDown(instance, epoch):
                self._scheduler.peer_down(instance, epoch)
                self._exchange.unmap_instance(instance, epoch)
                self._link.send(Released(instance, epoch))
            case SetRole(role, mixed):
                self._scheduler.set_role(role, mixed)
            case Audit(beat, log_level):
                journal.follow(log_level)
                self._beat, self._stats_sent, self._stats_due_s = beat, None, 0.0
                self._auditor.demand()
            case Exit():
                self._is_exiting = True
            case _:
                assert_never(command)

    def _connect(self, peer: PeerUp) -> None:
        try:
            self._map_peer(peer)
        except LayoutMismatch as error:
            # Its handles stay unknown here, so the daemon hears of it with the first one.
            logger.error("cannot pull from %s: %s", peer.worker, error)

    def _flush(self) -> None:
        for event in self._scheduler.outbox:
            self._link.send(event)
        self._scheduler.outbox.clear()

    def _report(self, now_s: float, *, is_idle: bool) -> None:
        """The books go out on the clock while steps run, and whenever the leader goes idle."""
        if not is_idle and now_s < self._stats_due_s:
            return
        self._auditor.look(now_s)
        self._send_stats(now_s)

    def _send_stats(self, now_s: float) -> None:
        stats = self._stats()
        if stats != self._stats_sent:
            self._link.send(stats)
        self._stats_sent = stats
        self._stats_due_s = now_s + STATS_INTERVAL_S

    def _stats(self) -> Stats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        counters = scheduler.counters
        return Stats(
            num_steps=counters.num_steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            prefill_steps=counters.prefill_steps,
            decode_steps=counters.decode_steps,
            num_pulls=counters.num_pulls,
            pulled_bytes=counters.pulled_bytes,
            pull_faults=counters.pull_faults,
            hidden_bytes=self._hidden_bytes(),
            num_preempted=scheduler.decodes.num_preempted,
            num_waiting=scheduler.prefills.num_waiting + scheduler.decodes.num_waiting,
            num_running=scheduler.decodes.num_running,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_held=pool.num_held,
            blocks_in_use=pool.num_in_use,
            last_step_s=self._last_step_s,
            control_s=self._control.total_s,
            audit_failures=self._auditor.num_faults,
            audit_standing=self._auditor.num_standing,
            beat=self._beat,
            busy_until_s=self._busy_until_s,
            pull_since_s=min(self._pulls_since_s.values(), default=None),
            pull_path=self._pull_path(),
        )
