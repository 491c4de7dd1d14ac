"""The admin console's end in the daemon: a ROUTER socket that answers a few commands.

Who may ask is decided by the kernel: `ipc://` messages bear the peer's user id, and only our own
and root's are served. A console can neither crash nor stall the service: requests are read one
at a time with a rest after each, answers that a stuck reader leaves lying are dropped, and a
drain waits in a task of its own. What a command does is the `Operator`'s business.
"""

import asyncio
import logging
import os
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Protocol, assert_never

import zmq
import zmq.asyncio

from daemon import admin_protocol
from daemon.admin_protocol import (
    Answer,
    BadMessage,
    Done,
    Drain,
    Failed,
    FailureCode,
    GetStatus,
    Reply,
    Request,
    Status,
    StatusIs,
    Undrain,
)

logger = logging.getLogger(__name__)

MAX_PENDING_DRAINS = 8
_QUEUED_MESSAGES = 16  # per console and direction, then the console waits or loses answers
_REST_S = 0.002  # after each request: a flooding console gets 500 answers a second, at most


class RefusedByState(Exception):
    """The command makes no sense in the node's present state."""


class Operator(Protocol):
    """What the console may do to the node."""

    def status(self) -> Status: ...

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new; return when nothing is left. The node stays drained either way.

        Raises:
            TimeoutError: requests are still there after `deadline_s`.
            RefusedByState: the node cannot be drained now.
        """

    def undrain(self) -> None:
        """Take requests again. Raises RefusedByState when the node is not draining."""


class AdminConsole:
    """Serves consoles on `socket_path`; bound when made, `serve` until cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket_path: Path,
        operator: Operator,
        *,
        allowed_uids: Set[int] = frozenset({0, os.getuid()}),
    ) -> None:
        self._operator = operator
        self._allowed_uids = allowed_uids
        self._num_drains = 0
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, admin_protocol.MAX_ADMIN_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        umask = os.umask(0o077)  # the socket's file is ours alone from its first moment
        try:
            self._socket.bind(f"ipc://{socket_path}")
        finally:
            os.umask(umask)

    async def serve(self) -> None:
        """Answer consoles until cancelled; drains that still wait are then given up."""
        try:
            async with asyncio.TaskGroup() as drains:
                while True:
                    frames = await self._socket.recv_multipart(copy=False)
                    await self._on_message(frames, drains)
                    await asyncio.sleep(_REST_S)
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()

    async def _on_message(self, frames: Sequence[zmq.Frame], drains: asyncio.TaskGroup) -> None:
        console, body = frames[0].bytes, frames[-1]
        peer = _Peer.of(body)
        if peer is None or peer.uid not in self._allowed_uids:
            logger.warning("admin console: refused %s", peer or "a peer without credentials")
            refusal = Failed(FailureCode.NOT_PERMITTED, "only the daemon's own user and root may")
            return await self._reply(console, Reply(None, refusal))
        try:
            request = admin_protocol.read_request(_only_body(frames))
        except BadMessage as error:
            failure = Failed(FailureCode.BAD_REQUEST, str(error))
            return await self._reply(console, Reply(None, failure))
        await self._on_request(console, peer, request, drains)

    async def _on_request(
        self, console: bytes, peer: "_Peer", request: Request, drains: asyncio.TaskGroup
    ) -> None:
        match request.command:
            case GetStatus():
                answer = self._answer_status()
            case Undrain():
                logger.info("admin console: undrain, by %s", peer)
                answer = self._undrain()
            case Drain(deadline_s):
                logger.info("admin console: drain within %g s, by %s", deadline_s, peer)
                if self._num_drains < MAX_PENDING_DRAINS:
                    drains.create_task(self._drain(console, request.call_id, deadline_s))
                    return
                answer = Failed(FailureCode.REFUSED, "too many consoles wait for the drain")
            case _:
                assert_never(request.command)
        await self._reply(console, Reply(request.call_id, answer))

    def _answer_status(self) -> Answer:
        try:
            return StatusIs(self._operator.status())
        except Exception as error:
            return _failure(error)

    def _undrain(self) -> Answer:
        try:
            self._operator.undrain()
        except Exception as error:
            return _failure(error)
        return Done()

    async def _drain(self, console: bytes, call_id: int, deadline_s: float) -> None:
        self._num_drains += 1
        answer: Answer = Done()
        try:
            await self._operator.drain(deadline_s)
        except Exception as error:
            answer = _failure(error)
        finally:
            self._num_drains -= 1
        await self._reply(console, Reply(call_id, answer))

    async def _reply(self, console: bytes, reply: Reply) -> None:
        """Never waits: a ROUTER drops what a gone or stuck console does not take."""
        frames = [console, admin_protocol.encode(reply)]
        await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)


class _Peer:
    """Who sent a message, as the kernel says."""

    def __init__(self, uid: int, pid: str) -> None:
        self.uid = uid
        self.pid = pid

    @classmethod
    def of(cls, frame: zmq.Frame) -> "_Peer | None":
        """`Peer-Address` of an ipc message is `host:uid:gid:pid`; None for anything else."""
        try:
            _, uid, _, pid = str(frame.get("Peer-Address")).split(":")
            return cls(int(uid), pid)
        except (zmq.ZMQError, ValueError):
            return None

    def __str__(self) -> str:
        return f"user {self.uid}, process {self.pid}"


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
