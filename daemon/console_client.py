"""The client's end of the admin console: plain blocking ZeroMQ, one question at a time.

It finds the daemon by the socket in its run directory, or over TCP with keys. A question that was
given up leaves nothing behind: its late answer bears another number than the next question's.
"""

import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from daemon import admin_protocol
from daemon.admin_commands import (
    ApplyPlan,
    AuditBooks,
    Command,
    Drain,
    GetEvents,
    Restart,
    ScaleAdd,
    ScaleRemove,
)
from daemon.admin_keys import ConsoleKeys, read_console_keys
from daemon.admin_protocol import ADMIN_VERSION, Answer, BadMessage, Failed, FailureCode, Request
from daemon.console_errors import CommandFailed, UsageError
from daemon.errors import Unreachable
from ipc.curve import call_with

ANSWER_S = 5.0
CONNECT_S = 5.0
_NOBODY = "no daemon listens on the admin socket; is it running?"
_START_S = 600.0  # an instance may take so long to load
_HEARTBEAT_MS = 1000
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2000
_WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Whereabouts(msgspec.Struct, frozen=True):
    """Where the daemon is: a socket's address, and the keys to come in with over TCP."""

    address: str
    keys: ConsoleKeys | None = None

    @property
    def path(self) -> Path | None:
        """Of a local socket."""
        return None if self.keys else Path(self.address.removeprefix("ipc://"))


def whereabouts(socket_path: Path, connect: str | None, keys: Path | None) -> Whereabouts:
    """Raises UsageError, or ConfigError."""
    if connect is None:
        return Whereabouts(f"ipc://{socket_path}")
    if keys is None:
        raise UsageError("--connect takes --keys too: over TCP nobody comes in without")
    return Whereabouts(connect, read_console_keys(keys))


class ConsoleClient:
    """Asks the daemon behind one socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._monitor = monitor
        self._call_ids = itertools.count(1)

    def ask(self, command: Command, timeout_s: float | None = None) -> Answer:
        """The answer, which is no failure.

        Raises:
            Unreachable: no daemon is there.
            CommandFailed: it says no, in its own words, or nothing in time.
        """
        wait_s = patience_s(command) if timeout_s is None else timeout_s
        request = Request(ADMIN_VERSION, next(self._call_ids), command)
        self._until_connected(min(CONNECT_S, wait_s))
        self._socket.send(admin_protocol.encode(request))
        answer = self._answer_to(request.call_id, time.monotonic() + wait_s)
        if isinstance(answer, Failed):
            raise CommandFailed(answer.code, answer.message)
        return answer

    def _until_connected(self, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while left_s := max(0.0, deadline_s - time.monotonic()):
            ready = self._poll(zmq.POLLOUT, left_s)
            if self._socket in ready:
                while self._monitor.poll(0):  # what is past does not concern what comes
                    recv_monitor_message(self._monitor)
                return
            if self._monitor in ready:
                self._check(recv_monitor_message(self._monitor)["event"])
        raise Unreachable(_NOBODY)

    def _check(self, event: int) -> None:
        """Another try would end the same way, or there is nobody to wait for."""
        match event:
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise CommandFailed(FailureCode.NOT_PERMITTED, "the daemon does not let our key in")
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                message = "the daemon is not the one that our keys were made for"
                raise CommandFailed(FailureCode.NOT_PERMITTED, message)
            case zmq.EVENT_CONNECT_RETRIED:
                raise Unreachable(_NOBODY)

    def _answer_to(self, call_id: int, deadline_s: float) -> Answer:
        while ready := self._poll(zmq.POLLIN, max(0.0, deadline_s - time.monotonic())):
            if self._socket not in ready:
                recv_monitor_message(self._monitor)
                raise Unreachable("the daemon went away before it answered")
            try:
                reply = admin_protocol.read_reply(self._socket.recv())
            except BadMessage as error:
                raise CommandFailed(FailureCode.INTERNAL, f"unreadable answer: {error}") from error
            if reply.call_id in (call_id, None):
                return reply.answer
        return Failed(FailureCode.TIMEOUT, "the daemon did not answer in time")

    def _poll(self, event: int, within_s: float) -> dict[Any, int]:
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._monitor, zmq.POLLIN)
        return dict(poller.poll(math.ceil(within_s * 1000)))


def patience_s(command: Command) -> float:
    """How long its answer may take."""
    match command:
        case AuditBooks(wait_s) | GetEvents(wait_s=wait_s):
            return wait_s + ANSWER_S
        case Drain(deadline_s):
            return deadline_s + ANSWER_S
        case ApplyPlan(deadline_s=deadline_s) | Restart(deadline_s=deadline_s):
            return deadline_s + _START_S
        case ScaleRemove(deadline_s=deadline_s):
            return deadline_s + _START_S
        case ScaleAdd():
            return _START_S
        case _:
            return ANSWER_S


@contextmanager
def connected(where: Whereabouts) -> Iterator[ConsoleClient]:
    """A client of the daemon that listens there.

    Raises:
        Unreachable: there is no such socket.
        CommandFailed: it is another user's.
    """
    if where.path is not None:
        _check_access(where.path)
    with zmq.Context() as context, dealer(context, where) as socket:
        monitor = socket.get_monitor_socket(_WATCHED)
        socket.connect(where.address)
        try:
            yield ConsoleClient(socket, monitor)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


@contextmanager
def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", where: Whereabouts
) -> Iterator[zmq.Socket[bytes]]:
    """A socket that is not connected yet; it comes back by itself to a daemon that does."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue for a daemon that is gone
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        if where.keys is not None:
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            call_with(socket, where.keys.server, where.keys.own)
        yield socket


def _check_access(socket_path: Path) -> None:
    try:
        socket_path.stat()
        permitted = os.access(socket_path, os.W_OK)
    except PermissionError:
        permitted = False
    except OSError as error:
        raise Unreachable(f"no daemon answers at {socket_path}; is it running?") from error
    if not permitted:
        message = f"{socket_path} is another user's; ask as that user or as root"
        raise CommandFailed(FailureCode.NOT_PERMITTED, message)
