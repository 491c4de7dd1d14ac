"""The admin console's end in the daemon: reads requests off a door's socket and answers them.

A console can neither crash nor stall the service: requests are read one at a time, with a rest
after each that is longer the more work it was, answers that a stuck reader leaves lying are
dropped, and what has to wait does so in a task of its own, of which each console may have a few.
What a command does is the `Operator`'s business; who gave an order goes to the log.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import zmq

from daemon import admin_protocol
from daemon.admin_commands import Order, Question, Waiting, spoken
from daemon.admin_door import Door
from daemon.admin_protocol import Answer, BadMessage, Failed, FailureCode, Reply, Request

logger = logging.getLogger(__name__)

MAX_WAITING = 8  # of one console
MAX_WAITING_IN_ALL = 64
_REST_S = 0.002  # after each request: a flooding console gets 500 answers a second, at most,
_REST_RATIO = 9.0  # and a tenth of the daemon's time
_MAX_REST_S = 0.25


class RefusedByState(Exception):
    """The command makes no sense in the node's present state."""


class Operator(Protocol):
    """What the console may do to the node."""

    def answer(self, question: Question) -> Answer:
        """At once, and with bounded work. Raises RefusedByState."""

    async def carry_out(self, command: Waiting | Order) -> Answer:
        """When it is done, or its deadline has passed.

        Raises:
            TimeoutError: it was not done in time.
            RefusedByState: it cannot be done now.
        """


class AdminConsole:
    """Serves the consoles that come through one door; `serve` until cancelled."""

    def __init__(self, door: Door, operator: Operator) -> None:
        self._door = door
        self._operator = operator
        self._waiting: Counter[bytes] = Counter()

    async def serve(self) -> None:
        """Answer consoles until cancelled; what still waits is then given up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._door.keep())
                while True:
                    frames = await self._door.socket.recv_multipart(copy=False)
                    began_s = time.thread_time()
                    await self._on_message(frames, tasks)
                    await asyncio.sleep(0)  # what a task of it does at once is counted too
                    spent_s = time.thread_time() - began_s
                    await asyncio.sleep(min(max(_REST_S, _REST_RATIO * spent_s), _MAX_REST_S))
        finally:
            self.close()

    def close(self) -> None:
        self._door.close()

    async def _on_message(self, frames: Sequence[zmq.Frame], tasks: asyncio.TaskGroup) -> None:
        console = frames[0].bytes
        who = self._door.who(frames[-1])
        if who is None:
            return await self._fail(console, FailureCode.NOT_PERMITTED, self._door.refusal)
        try:
            request = admin_protocol.read_request(_only_body(frames))
        except BadMessage as error:
            return await self._fail(console, FailureCode.BAD_REQUEST, str(error))
        if isinstance(request.command, Question):
            return await self._reply(console, Reply(request.call_id, self._answer(request.command)))
        if isinstance(request.command, Order) and not request.command.dry_run:
            logger.info("admin console: %s, by %s", spoken(request.command), who)
        await self._set_out(console, request, tasks)

    def _answer(self, question: Question) -> Answer:
        try:
            return self._operator.answer(question)
        except Exception as error:
            return _failure(error)

    async def _set_out(self, console: bytes, request: Request, tasks: asyncio.TaskGroup) -> None:
        is_full = self._waiting.total() >= MAX_WAITING_IN_ALL
        if is_full or self._waiting[console] >= MAX_WAITING:
            refusal = Failed(FailureCode.REFUSED, "too many commands of consoles wait already")
            return await self._reply(console, Reply(request.call_id, refusal))
        self._waiting[console] += 1
        tasks.create_task(self._carry_out(console, request))

    async def _carry_out(self, console: bytes, request: Request) -> None:
        command = request.command
        assert isinstance(command, Waiting | Order)
        try:
            answer = await self._operator.carry_out(command)
        except Exception as error:
            answer = _failure(error)
        finally:
            self._waiting[console] -= 1
            self._waiting += Counter()  # forget consoles that wait for nothing
        await self._reply(console, Reply(request.call_id, answer))

    async def _fail(self, console: bytes, code: FailureCode, message: str) -> None:
        await self._reply(console, Reply(None, Failed(code, message)))

    async def _reply(self, console: bytes, reply: Reply) -> None:
        """Never waits: a ROUTER drops what a gone or stuck console does not take."""
        frames = [console, admin_protocol.encode(reply)]
        await self._door.socket.send_multipart(frames, flags=zmq.NOBLOCK)


def _only_body(frames: Sequence[zmq.Frame]) -> bytes:
    if len(frames) != 2:
        raise BadMessage(f"{len(frames) - 1} frames where one was due")
    return frames[1].bytes


def _failure(error: Exception) -> Failed:
    """What the console is told; an error of our own also goes to the log, with its traceback."""
    if isinstance(error, RefusedByState):
        return Failed(FailureCode.REFUSED, str(error))
    if isinstance(error, TimeoutError):
        return Failed(FailureCode.TIMEOUT, str(error) or "the deadline passed")
    logger.error("admin console: a command failed", exc_info=error)
    return Failed(FailureCode.INTERNAL, f"{type(error).__name__}: see the daemon's log")
