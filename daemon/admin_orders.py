"""Carries out a console's orders and waits: reaches the parts that do, and says what came of it.

Whatever can be ordered can be asked first what it would do; then nothing is touched.
"""

import asyncio
from collections.abc import Callable
from typing import assert_never

import msgspec

from daemon import admin_log_levels
from daemon.admin_commands import (
    MAX_LISTED,
    Abort,
    ApplyPlan,
    AuditBooks,
    Drain,
    GetEvents,
    Order,
    Question,
    Restart,
    ScaleAdd,
    ScaleRemove,
    SetLogLevel,
    Shutdown,
    Undrain,
    Waiting,
    spoken,
)
from daemon.admin_console import RefusedByState
from daemon.admin_log_levels import LogLevels
from daemon.admin_protocol import Answer, BooksAre, Done, EventsAre, WouldDo
from daemon.admin_questions import Sights, answer
from daemon.admin_views import AuditLine, EventKind
from daemon.controller import Controller
from daemon.errors import AbortedByOperator
from daemon.event_log import EventLog
from daemon.heartbeat import Heartbeat
from daemon.instances import Instance
from daemon.node import Node, block_counts
from daemon.operations import OperationRefused, Operations
from daemon.request import Request
from ipc.placement_file import PlacementError, parse_placement
from ipc.vocabulary import Parallelism, Placement


class Reach(msgspec.Struct, frozen=True):
    """Whom orders move. `shut_down` is told how long the drain may take; None: as configured."""

    node: Node
    controller: Controller
    operations: Operations
    heartbeat: Heartbeat
    events: EventLog
    log_levels: LogLevels
    shut_down: Callable[[float | None], None]


class NodeOperator:
    """What a console may do to this node: the `Operator` of the admin console."""

    def __init__(self, sights: Sights, reach: Reach) -> None:
        self._sights = sights
        self._reach = reach
        self._controller = reach.controller
        self._operations = reach.operations

    def answer(self, question: Question) -> Answer:
        return answer(self._sights, question)

    async def carry_out(self, command: Waiting | Order) -> Answer:
        try:
            match command:
                case AuditBooks(wait_s):
                    return await self._audit(wait_s)
                case GetEvents():
                    return await self._events(command)
                case _ if command.dry_run:
                    return WouldDo(tuple(self._would(command)))
                case _:
                    self._reach.events.note(EventKind.ORDERED, "console", spoken(command))
                    return Done(await self._do(command))
        except OperationRefused as refused:
            raise RefusedByState(str(refused)) from refused

    # ---- orders -----------------------------------------------------------------------------

    async def _do(self, order: Order) -> str:
        match order:
            case Abort(word):
                request = self._open_request(word)
                self._controller.fail(request, AbortedByOperator())
                return f"request {request.arrival} is ended"
            case Drain(deadline_s, instance):
                return await self._drain(deadline_s, instance)
            case Undrain(instance):
                return self._undrain(instance)
            case SetLogLevel(level, logger, for_s):
                return self._reach.log_levels.set(level, logger, for_s)
            case Shutdown(deadline_s):
                self._reach.shut_down(deadline_s)
                return "the daemon drains and ends"
            case _:
                return await self._operate(order)

    async def _operate(self, order: ApplyPlan | Restart | ScaleAdd | ScaleRemove) -> str:
        match order:
            case ApplyPlan(text, deadline_s):
                change = self._operations.change_to(read_plan(text))
                await self._operations.apply(read_plan(text), deadline_s)
                self._reach.events.note(EventKind.PLAN_APPLIED, "node", "; ".join(change.sentences))
                return "the placement is taken over"
            case Restart(name, deadline_s):
                await self._operations.restart(name, deadline_s)
                return f"{name} can serve again"
            case ScaleAdd(role, tp, pp):
                name = await self._operations.add(role, Parallelism(tp, pp))
                return f"{name} can serve"
            case ScaleRemove(name, deadline_s):
                await self._operations.remove(name, deadline_s)
                return f"{name} is gone"
            case _:
                assert_never(order)

    async def _drain(self, deadline_s: float, name: str | None) -> str:
        if name is None:
            await self._reach.node.drain(deadline_s)
            return "drained"
        self._instance(name)
        self._reach.events.note(EventKind.DRAIN_BEGAN, name)
        async with asyncio.timeout(deadline_s):
            if not await self._controller.drain_instance(name):
                raise RefusedByState(f"{name} was taken back before it was drained")
        self._reach.events.note(EventKind.DRAIN_ENDED, name, "nothing is left there")
        return f"{name} is drained"

    def _undrain(self, name: str | None) -> str:
        if name is None:
            self._reach.node.undrain()
            return "taking requests"
        self._draining(name)
        self._controller.undrain_instance(name)
        self._reach.events.note(EventKind.DRAIN_ENDED, name, "taken back")
        return f"{name} takes requests"

    # ---- what would be ----------------------------------------------------------------------

    def _would(self, order: Order) -> list[str]:
        match order:
            case Abort(word):
                request = self._open_request(word)
                return [f"end request {request.arrival} after {request.num_output} tokens"]
            case Drain():
                return self._would_drain(order)
            case Undrain(instance):
                self._draining(instance)
                return [f"{instance or 'the node'} would take requests again"]
            case SetLogLevel(level, logger, for_s):
                return [admin_log_levels.describe(level, logger, for_s)]
            case Shutdown(deadline_s):
                after = "as long as configured" if deadline_s is None else f"{deadline_s:g} s"
                num_open = self._controller.num_open
                return [f"{num_open} requests may take {after}", "end the daemon and its workers"]
            case _:
                return self._would_operate(order)

    def _would_operate(self, order: ApplyPlan | Restart | ScaleAdd | ScaleRemove) -> list[str]:
        match order:
            case ApplyPlan(text):
                return self._operations.change_to(read_plan(text)).sentences
            case Restart(name):
                return self._operations.dry_run_restart(name)
            case ScaleAdd(role, tp, pp):
                spec = self._operations.next_spec(role, Parallelism(tp, pp))
                devices = [str(device) for seg in spec.segments for device in seg.devices]
                return [f"start {spec.name} on device {', '.join(devices)}, tp {tp}, pp {pp}"]
            case ScaleRemove(name):
                return self._operations.dry_run_remove(name)
            case _:
                assert_never(order)

    def _would_drain(self, order: Drain) -> list[str]:
        if order.instance is None:
            whom, what = "the node", f"{self._controller.num_open} requests"
        else:
            instance = self._instance(order.instance)
            whom = order.instance
            what = f"{len(instance.queued)} prompts and {len(instance.sequences)} sequences"
        return [f"{whom} would take nothing new", f"{what} may take {order.deadline_s:g} s"]

    # ---- waits ------------------------------------------------------------------------------

    async def _audit(self, wait_s: float) -> Answer:
        heartbeat = self._reach.heartbeat
        number = heartbeat.ask()
        try:
            async with asyncio.timeout(wait_s):
                while heartbeat.silent(number):
                    await heartbeat.heard()
        except TimeoutError:
            pass  # who has not answered is told so
        silent = {life.leader.instance for life in heartbeat.silent(number)}
        instances = self._controller.instances
        return BooksAre(tuple(_audit_line(i, has_answered=i.name not in silent) for i in instances))

    async def _events(self, asked: GetEvents) -> Answer:
        events = self._reach.events
        if asked.after is not None and asked.wait_s > 0:
            try:
                async with asyncio.timeout(asked.wait_s):
                    await events.newer_than(asked.after)
            except TimeoutError:
                pass  # then there are none
        page = events.after(asked.after, MAX_LISTED)
        return EventsAre(tuple(page.events), page.next_after, page.num_lost)

    # ---- finding ----------------------------------------------------------------------------

    def _open_request(self, word: str) -> Request:
        request = self._controller.timelines.find_open(word)
        if request is None:
            raise RefusedByState(f"no request {word!r} is open")
        return request

    def _instance(self, name: str) -> Instance:
        instance = self._controller.instances.get(name)
        if instance is None:
            known = ", ".join(i.name for i in self._controller.instances) or "none"
            raise RefusedByState(f"no instance {name!r} is up; there are: {known}")
        return instance

    def _draining(self, name: str | None) -> None:
        """It drains: the node (None), or an instance."""
        it = self._controller if name is None else self._instance(name)
        if not it.is_draining:
            raise RefusedByState(f"{name or 'the node'} is not draining")


def read_plan(text: str) -> Placement:
    """Raises OperationRefused: that is no placement file."""
    try:
        return parse_placement(text.encode()).placement
    except PlacementError as error:
        raise OperationRefused(str(error)) from error


def _audit_line(instance: Instance, *, has_answered: bool) -> AuditLine:
    stats = instance.stats
    return AuditLine(
        instance=instance.name,
        has_answered=has_answered,
        blocks=block_counts(stats),
        faults=stats.audit_standing,
        faults_ever=stats.audit_failures,
    )
