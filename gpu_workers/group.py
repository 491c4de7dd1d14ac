"""An instance's workers as one engine: what the leader's step loop drives in place of its own.

The plan goes to the followers first, then the leader does its own part; a step has ended when the
rank that draws says so, and a pull when every rank has copied its part. With one worker none of
this is used.
"""

from typing import Any, Protocol

import msgspec

from gpu_workers.leader import Pulls, StepExecutor
from gpu_workers.plan_bus import LeaderBus, Waiting
from gpu_workers.step_plan import PullResult, StepPlan, StepResult
from ipc.messages import Command, Event, Tokens
from ipc.sockets import WorkerSocket
from ipc.vocabulary import Parallelism, WorkerName

# A step that takes longer has lost a rank that nobody saw end.
RESULT_TIMEOUT_S = 300.0


class Followers(Protocol):
    """The leader's way to its followers; answers are about what has come in already."""

    def send(self, plan: StepPlan) -> None: ...

    def has_result(self, step_id: int) -> bool: ...

    def result(self, step_id: int, timeout_s: float) -> StepResult: ...

    def take_pulls(self) -> list[PullResult]: ...


class _Launched(msgspec.Struct, frozen=True):
    own: Any
    step_id: int
    has_rows: bool


class GroupExecutor:
    """Launches a plan on all ranks; collects what the drawing rank drew."""

    def __init__(
        self, executor: StepExecutor, followers: Followers, parallelism: Parallelism
    ) -> None:
        self._executor = executor
        self._followers = followers
        self._draws_here = drawer("", parallelism).is_leader

    def launch(self, plan: StepPlan) -> _Launched:
        self._followers.send(plan)
        return _Launched(self._executor.launch(plan), plan.step_id, bool(plan.rows))

    def is_done(self, launched: _Launched) -> bool:
        """Whether the drawing rank's word has come."""
        return self._is_own(launched) or self._followers.has_result(launched.step_id)

    def collect(self, launched: _Launched) -> StepResult:
        own = self._executor.collect(launched.own)
        if self._is_own(launched):
            return own
        return self._followers.result(launched.step_id, RESULT_TIMEOUT_S)

    def _is_own(self, launched: _Launched) -> bool:
        """Nothing comes back of a step without rows."""
        return self._draws_here or not launched.has_rows


class GroupExchange:
    """Pulls of all ranks: one has ended when each of them has copied its part."""

    def __init__(self, exchange: Pulls, followers: Followers, num_workers: int) -> None:
        self._exchange = exchange
        self._followers = followers
        self._num_workers = num_workers
        self._parts: dict[int, list[PullResult]] = {}

    def knows(self, instance: str, epoch: int) -> bool:
        return self._exchange.knows(instance, epoch)

    def unmap_instance(self, instance: str, epoch: int) -> None:
        """Here; followers do it when the next plan says so."""
        self._exchange.unmap_instance(instance, epoch)

    def finished(self) -> list[PullResult]:
        """From the first rank's start to the last one's end, with all bytes."""
        whole = []
        for part in [*self._exchange.finished(), *self._followers.take_pulls()]:
            parts = self._parts.setdefault(part.request_id, [])
            parts.append(part)
            if len(parts) == self._num_workers:
                whole.append(_merged(self._parts.pop(part.request_id)))
        return whole


class GroupLink:
    """The way to the daemon, which is also heard while followers are waited for."""

    def __init__(self, link: WorkerSocket, bus: LeaderBus) -> None:
        self._link = link
        self._bus = bus
        self._waiting = Waiting([link.waitable, *bus.waitables])

    def send(self, event: Event | Tokens) -> None:
        self._link.send(event)

    def receive(self, timeout_s: float | None) -> list[Command]:
        """Commands, perhaps none where followers have said something."""
        if timeout_s != 0:
            self._waiting(timeout_s)
        self._bus.drain()
        return self._link.receive(0)


def drawer(instance: str, parallelism: Parallelism) -> WorkerName:
    """The rank that draws: it has the last stage's logits."""
    return WorkerName(instance, parallelism.pp - 1, 0)


def ranks(instance: str, parallelism: Parallelism) -> list[WorkerName]:
    """All workers of an instance, the leader first."""
    return [
        WorkerName(instance, stage, tp_rank)
        for stage in range(parallelism.pp)
        for tp_rank in range(parallelism.tp)
    ]


def _merged(parts: list[PullResult]) -> PullResult:
    return PullResult(
        request_id=parts[0].request_id,
        num_bytes=sum(part.num_bytes for part in parts),
        started_s=min(part.started_s for part in parts),
        ended_s=max(part.ended_s for part in parts),
        num_different=sum(part.num_different for part in parts),
        loss=next((part.loss for part in parts if part.is_lost), ""),
    )
