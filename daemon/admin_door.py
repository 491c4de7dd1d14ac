"""Who may come in to the admin console: a ROUTER socket, and who is behind each of its messages.

On the local socket the kernel says so: messages bear the peer's user id, and only our own and
root's are served (the file's mode keeps the others from connecting at all). Over TCP it is keys:
CURVE encrypts, ZAP (ZeroMQ RFC 27) refuses the handshake of whoever has none of ours, and each
message bears the name of the key that it came with.
"""

import logging
import os
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils import z85

from daemon.admin_keys import AdminKeys
from daemon.admin_protocol import MAX_ADMIN_MESSAGE_BYTES
from ipc.curve import ZAP_ENDPOINT, listen_with

logger = logging.getLogger(__name__)

_QUEUED_MESSAGES = 16  # per console and direction, then the console waits or loses answers
_ZAP_DOMAIN = b"admin"
_REFUSALS_LOGGED_EVERY_S = 1.0
_HANDSHAKE_MS = 5000
_HEARTBEAT_MS = {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 3000, zmq.HEARTBEAT_TTL: 5000}


class Door(Protocol):
    """A bound socket, and who speaks on it."""

    refusal: str
    socket: zmq.asyncio.Socket

    def who(self, frame: zmq.Frame) -> str | None:
        """Who sent that frame, for the log; None: somebody who may not."""

    async def keep(self) -> None:
        """What the door needs done for as long as it is open."""

    def close(self) -> None: ...


class LocalDoor:
    """The socket in the run directory."""

    refusal = "only the daemon's own user and root may"

    def __init__(
        self,
        context: zmq.asyncio.Context,
        path: Path,
        allowed_uids: Set[int] = frozenset({0, os.getuid()}),
    ) -> None:
        self._allowed_uids = allowed_uids
        self.socket = _router(context)
        umask = os.umask(0o077)  # the socket's file is ours alone from its first moment
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(umask)

    def who(self, frame: zmq.Frame) -> str | None:
        """`Peer-Address` of an ipc message is `host:uid:gid:pid`."""
        try:
            _, uid, _, pid = str(frame.get("Peer-Address")).split(":")
            number = int(uid)
        except (zmq.ZMQError, ValueError):
            logger.warning("admin console: refused a peer without credentials")
            return None
        if number not in self._allowed_uids:
            logger.warning("admin console: refused user %d, process %s", number, pid)
            return None
        return f"user {number}, process {pid}"

    async def keep(self) -> None:
        """Nothing: the kernel keeps it."""

    def close(self) -> None:
        self.socket.close()


class KeyDoor:
    """A TCP port. It has a context of its own, since there is one doorkeeper in each."""

    refusal = "its key is none of those that may come in"

    def __init__(self, address: str, keys: AdminKeys) -> None:
        self.admit(keys)
        self._refused_s = -_REFUSALS_LOGGED_EVERY_S
        self._context = zmq.asyncio.Context()
        self._questions: zmq.asyncio.Socket = self._context.socket(zmq.REP)
        self.socket = _router(self._context)
        try:
            self._questions.bind(ZAP_ENDPOINT)
            self._open(address, keys)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """With the port, where any was asked for."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def admit(self, keys: AdminKeys) -> None:
        """Let in these from now on; who came in with another is not heard any more."""
        self._names = {z85.decode(key): name for key, name in keys.names.items()}

    def who(self, frame: zmq.Frame) -> str | None:
        """`User-Id` is the key that the doorkeeper let in."""
        try:
            name = self._names.get(z85.decode(str(frame.get("User-Id"))))
            return None if name is None else f"console {name}, from {frame.get('Peer-Address')}"
        except (zmq.ZMQError, ValueError):
            return None

    async def keep(self) -> None:
        """Answer whom the socket may let in."""
        while True:
            await self._questions.send_multipart(
                self._answer(await self._questions.recv_multipart())
            )

    def close(self) -> None:
        self.socket.close()
        self._questions.close()
        self._context.term()

    def _open(self, address: str, keys: AdminKeys) -> None:
        listen_with(self.socket, keys.own)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        for option, value in _HEARTBEAT_MS.items():
            self.socket.setsockopt(option, value)
        self.socket.bind(address)

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        version, request_id, _, address, _, mechanism, *credentials = question
        if mechanism != b"CURVE" or not credentials or credentials[0] not in self._names:
            self._log_refusal(address)
            return [version, request_id, b"400", b"not a console's key", b"", b""]
        return [version, request_id, b"200", b"OK", z85.encode(credentials[0]), b""]

    def _log_refusal(self, address: bytes) -> None:
        """Not as often as somebody knocks."""
        now_s = time.monotonic()
        if now_s - self._refused_s >= _REFUSALS_LOGGED_EVERY_S:
            self._refused_s = now_s
            logger.warning("admin console: refused an unknown key from %s", address.decode())


def _router(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ADMIN_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    return socket
