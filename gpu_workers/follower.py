"""A worker that is not its instance's leader: carries out the leader's plans, decides nothing.

It waits for several things at once: plans, the daemon's word, the end of the leader's process and,
where it draws on a GPU, the end of steps: launching one never waits for the one before it.
Pools of peers are forgotten in the order of plans, not when the daemon says so, because a plan
that is still on its way may read them.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpu_workers.kv_exchange import KVExchange
from gpu_workers.leader import PULL_LOOK_S, Link, StepExecutor
from gpu_workers.plan_bus import GroupBroken
from gpu_workers.step_plan import Pull, PullResult, StepPlan, StepResult
from ipc import journal
from ipc.kv_layout import LayoutMismatch
from ipc.messages import Alive, Audit, Command, Exit, PeerDown, PeerUp, Released

logger = logging.getLogger(__name__)

INTRODUCTION_TIMEOUT_S = 10.0
DISMISSAL_TIMEOUT_S = 1.0


class PlanFeed(Protocol):
    """A follower's end of the plan bus."""

    @property
    def is_dismissed(self) -> bool: ...

    def receive(self) -> list[StepPlan]: ...

    def report(self, result: StepResult | PullResult) -> None: ...


class StepWatch(Protocol):
    """Says how far a device has come."""

    def mark(self) -> None: ...

    def passed(self) -> int: ...


class Peers:
    """Introduces pools to this rank's exchange.

    Args:
        take_descriptor: gives the pool's descriptor that came ahead of a `PeerUp`.
    """

    def __init__(self, exchange: KVExchange, take_descriptor: Callable[[PeerUp], int]) -> None:
        self._exchange = exchange
        self._take_descriptor = take_descriptor
        self._ended: dict[str, list[int]] = {}  # epochs by instance, in their order

    def introduce(self, peer: PeerUp) -> None:
        """Map a pool, unless a plan ended that incarnation before we heard of it."""
        descriptor = self._take_descriptor(peer)
        if self._has_ended(peer.worker.instance, peer.epoch):
            os.close(descriptor)
            return
        try:
            self._exchange.map_peer(peer.worker, peer.epoch, peer.layout, descriptor)
        except LayoutMismatch as error:  # as the leader finds, who then asks for no pull
            logger.error("cannot pull from %s: %s", peer.worker, error)

    def end(self, instance: str, epoch: int) -> None:
        """A plan says that this incarnation is over; its executor unmaps the pools."""
        self._ended.setdefault(instance, []).append(epoch)

    def _has_ended(self, instance: str, epoch: int) -> bool:
        """Epochs are introduced in their order: those before this one are not heard of again, and
        are forgotten."""
        epochs = self._ended.pop(instance, [])
        if epoch not in epochs:
            return False
        self._ended[instance] = epochs[epochs.index(epoch) :]
        return True


class Follower:
    """Drives one executor by the plans of its leader.

    Args:
        wait: until a plan, a command or the leader's end has come, or the time is over.
        draws: whether this is the rank whose results the leader waits for.
        device: tells when steps end, and wakes `wait`; without one they end while being launched.
    """

    def __init__(
        self,
        link: Link,
        feed: PlanFeed,
        executor: StepExecutor,
        exchange: KVExchange,
        peers: Peers,
        *,
        wait: Callable[[float | None], object],
        draws: bool,
        device: StepWatch | None = None,
    ) -> None:
        self._link = link
        self._feed = feed
        self._executor = executor
        self._exchange = exchange
        self._peers = peers
        self._wait = wait
        self._draws = draws
        self._device = device
        self._under_way: deque[Any] = deque()  # launched steps that the leader waits for
        self._num_pulling = 0
        self._exit_by_s: float | None = None

    def run(self) -> None:
        """Until the leader dismisses us; its last plans are carried out even if we were told to
        exit before, so that no other rank waits for us in vain.

        Raises:
            GroupBroken: the leader is gone or has become incomprehensible.
            CollectivesFailed: another rank is gone.
        """
        while not self._feed.is_dismissed:
            self._wait(self._patience_s())
            self.obey(self._link.receive(0))
            for plan in self._feed.receive():
                self.carry_out(plan)
                self.obey(self._link.receive(0))
            self._report_steps()
            self._report_pulls()
            if self._exit_by_s is not None and time.monotonic() >= self._exit_by_s:
                return

    def obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case PeerUp():
                    self._peers.introduce(command)
                case PeerDown():
                    pass  # a plan will say when
                case Audit(beat, log_level):
                    journal.follow(log_level)
                    self._link.send(Alive(beat))
                case Exit():
                    self._exit_by_s = time.monotonic() + DISMISSAL_TIMEOUT_S
                case _:
                    logger.error("%s is not for a follower", type(command).__name__)

    def carry_out(self, plan: StepPlan) -> None:
        for instance, epoch in plan.unmapped:
            self._peers.end(instance, epoch)
        for pull in plan.pulls:
            self._await_introduction(plan.step_id, pull)
        launched = self._executor.launch(plan)
        for instance, epoch in plan.unmapped:
            self._link.send(Released(instance, epoch))
        if self._draws and plan.rows:
            self._under_way.append(launched)
            if self._device is not None:
                self._device.mark()
        self._num_pulling += len(plan.pulls)
        self._report_steps()
        self._report_pulls()

    def _await_introduction(self, step_id: int, pull: Pull) -> None:
        """The leader may have heard of a peer, and used it, a moment before us."""
        owner, epoch = pull.handle.owner, pull.handle.epoch
        deadline_s = time.monotonic() + INTRODUCTION_TIMEOUT_S
        while not self._exchange.knows(owner, epoch):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise GroupBroken(f"step {step_id} pulls from {owner}, who was not introduced")
            self.obey(self._link.receive(left_s))

    def _report_steps(self) -> None:
        """Those that have ended."""
        num_ended = len(self._under_way) if self._device is None else self._device.passed()
        for _ in range(num_ended):
            self._feed.report(self._executor.collect(self._under_way.popleft()))

    def _report_pulls(self) -> None:
        for result in self._exchange.finished():
            self._num_pulling -= 1
            self._feed.report(result)

    def _patience_s(self) -> float | None:
        """For ever, except that the end of a device's copies is no message, and that we may be
        about to leave."""
        if self._num_pulling:
            return PULL_LOOK_S
        if self._exit_by_s is not None:
            return max(0.0, self._exit_by_s - time.monotonic())
        return None
