"""The ZeroMQ link between the daemon and its workers: one ROUTER, one DEALER per process.

One ordered, numbered stream each way per worker process. The daemon's side is asyncio, the
worker's is plain and blocking. An identity names the worker and its epoch, so a message of a dead
incarnation can never be taken for one of its successor.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import zmq
import zmq.asyncio

from ipc import codec
from ipc.codec import Kind, Numbering
from ipc.messages import Command, Event, Tokens
from ipc.vocabulary import WorkerName

# A prompt of 128 k tokens with log probabilities stays below this.
MAX_MESSAGE_BYTES = 64 << 20

Sender = tuple[WorkerName, int]
"""Who speaks: a worker in one of its epochs."""


class PeerGone(Exception):
    """The worker's end of the link does not exist (any more)."""


class LinkBroken(Exception):
    """A worker's stream has a gap or is not of our protocol."""

    def __init__(self, sender: Sender, reason: str) -> None:
        super().__init__(f"{sender[0]}: {reason}")
        self.sender = sender
        self.reason = reason


def identity(worker: WorkerName, epoch: int) -> bytes:
    """What the worker calls itself on the link."""
    return f"{worker}#{epoch:x}".encode()


class DaemonSocket:
    """The daemon's end: sends commands to workers by name and epoch, yields their events."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # What is under way is bounded by admission; a control message must never be dropped.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)
        # The same socket: what is there already is taken without a future for each message.
        self._blocking: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._sent: dict[bytes, Numbering] = {}
        self._received: dict[bytes, tuple[Sender, Numbering]] = {}

    def open_epoch(self, worker: WorkerName, epoch: int) -> None:
        """Expect a new incarnation."""
        self._sent[identity(worker, epoch)] = Numbering()
        self._received[identity(worker, epoch)] = ((worker, epoch), Numbering())

    def close_epoch(self, worker: WorkerName, epoch: int) -> None:
        """Whatever still comes from that incarnation is dropped. Idempotent."""
        self._sent.pop(identity(worker, epoch), None)
        self._received.pop(identity(worker, epoch), None)

    def send(self, worker: WorkerName, epoch: int, command: Command) -> None:
        """Queue a command; never waits.

        Raises:
            PeerGone: the epoch is closed, or the process has left.
        """
        name = identity(worker, epoch)
        numbering = self._sent.get(name)
        if numbering is None:
            raise PeerGone(f"{worker} has no epoch {epoch:x}")
        frames = codec.encode(command, Kind.COMMAND, epoch, numbering.take())
        try:
            # pyzmq tries at once, so the future is done. Not through a shadow of the socket: that
            # would swallow the edge-triggered sign that something can be received.
            sent = self._socket.send_multipart([name, *frames], zmq.NOBLOCK)
            cast("asyncio.Future[object]", sent).result()
        except zmq.ZMQError as error:
            raise PeerGone(f"{worker}: {error}") from error

    async def receive(self) -> AsyncIterator[tuple[Sender, Event | Tokens]]:
        """Yield (sender, event) of open epochs.

        Raises:
            LinkBroken: a stream is at its end; the caller ends that epoch and listens on.
        """
        while True:
            name, *frames = self._waiting() or await self._socket.recv_multipart()
            if name not in self._received:
                continue
            sender, numbering = self._received[name]
            try:
                header = codec.read_header(frames)
                numbering.check(header.number)
                event = codec.read_event(header.kind, frames[1])
            except codec.WireError as error:
                self.close_epoch(*sender)
                raise LinkBroken(sender, str(error)) from error
            yield sender, event

    def _waiting(self) -> list[bytes] | None:
        """A message that is there already, at a fraction of what it takes to wait for one. Where
        there is none, whoever waits looks again, so that no sign of one is lost."""
        if not cast(int, self._blocking.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return self._blocking.recv_multipart(zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class WorkerSocket:
    """A worker's end: blocking, used by the thread of the step loop alone."""

    def __init__(self, endpoint: str, worker: WorkerName, epoch: int) -> None:
        self._epoch = epoch
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IDENTITY, identity(worker, epoch))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._sent = Numbering()
        self._received = Numbering()

    @property
    def waitable(self) -> zmq.Socket[bytes]:
        """To be polled beside other sockets; all else goes through this object."""
        return self._socket

    def send(self, event: Event | Tokens) -> None:
        kind = Kind.TOKENS if isinstance(event, Tokens) else Kind.EVENT
        self._socket.send_multipart(codec.encode(event, kind, self._epoch, self._sent.take()))

    def receive(self, timeout_s: float | None) -> list[Command]:
        """All commands that have come; waits for the first up to `timeout_s` (None: for ever).

        Raises:
            WireError: the stream has a gap or is not of our protocol: this epoch is over.
        """
        commands: list[Command] = []
        wait_ms = None if timeout_s is None else int(timeout_s * 1000)
        while self._socket.poll(wait_ms if not commands else 0):
            frames = self._socket.recv_multipart()
            header = codec.read_header(frames)
            self._received.check(header.number)
            if header.epoch == self._epoch:
                commands.append(codec.read_command(frames[1]))
        return commands

    def close(self) -> None:
        self._socket.close()
        self._context.term()
