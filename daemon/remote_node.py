"""Home's end of the link to a node that hosts segments of our instances, and its workers there.

A session begins with `Join` and lasts until the other node is silent for the bound, the link
loses a message, or the node says that it is over. Then every worker of it has ended, and another
session is tried, for ever.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never, cast

import zmq
import zmq.asyncio

from daemon import node_messages
from daemon.link_terms import Terms
from daemon.node_messages import (
    Ended,
    Evicted,
    FromHome,
    FromHost,
    Joined,
    Kill,
    Leave,
    Lend,
    Ping,
    Pong,
    Rejected,
    Said,
    Session,
    Spawn,
    Started,
    Tell,
)
from ipc.channel import PoolDescriptor
from ipc.codec import WireError
from ipc.curve import CurveKeys, call_with
from ipc.messages import (
    Broken,
    Command,
    Exit,
    Hello,
    Loading,
    PeerUp,
    Ready,
    Released,
    WorkerConfig,
)
from ipc.sockets import PeerGone, Sender
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)

KILLED_WITHIN_S = 0.5  # from the end of the bound to the last SIGKILL there
RETRY_S = 0.5
_LAST_WORDS_MS = 200

OnEvent = Callable[[WorkerName, int, Hello | Loading | Broken | Ready | Released], None]


class LinkLost(Exception):
    """The session is over; says why."""


class RemoteWorker:
    """A worker process of another node: the face of a `WorkerProcess`."""

    def __init__(self, config: WorkerConfig, node: "RemoteNode") -> None:
        self.config = config
        self.node = node.name
        self.pid = 0
        self.pool_descriptor = None  # it never leaves its node
        self._node = node
        self._moved = asyncio.Event()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    async def ended(self) -> str:
        """Wait until it is reaped there, or must have been; how it ended, in words."""
        return await asyncio.shield(self._end)

    async def until_started(self) -> None:
        """Raises OSError: it could not be."""
        await self._moved.wait()
        if self.has_ended:
            raise OSError(f"on {self.node}: {self._end.result()}")

    def started(self, pid: int) -> None:
        self.pid = pid
        self._moved.set()

    def end(self, how: str) -> None:
        if not self._end.done():
            self._end.set_result(how)
        self._moved.set()

    def take_pool(self) -> None:
        """Its host has taken it."""

    def give_pool(self, about: PoolDescriptor, descriptor: int | None) -> None:
        """Its host has the descriptor: pools are read within a node only."""
        self._order(Lend(self.config.name, self.config.epoch, about))

    def tell(self, command: Command) -> None:
        """Raises PeerGone."""
        assert isinstance(command, PeerUp | Exit), "all else is the leader's"
        self._node.send(Tell(self.config.name, self.config.epoch, command))

    def kill(self) -> None:
        if not self.has_ended:
            self._order(Kill(self.config.name, self.config.epoch))

    def close(self) -> None:
        """Nothing of it is held here."""

    def _order(self, message: FromHome) -> None:
        with contextlib.suppress(PeerGone):  # then it has ended
            self._node.send(message)


class RemoteNode:
    """The link to one node.

    Args:
        home: our own name.
        silence_s: how long either side may be silent.
        on_event: hears what starting workers say.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        name: str,
        address: str,
        keys: CurveKeys,
        *,
        home: str,
        terms: Terms,
        silence_s: float,
        on_event: OnEvent,
    ) -> None:
        self.name = name
        self.trouble = "it has not answered yet"
        self._context = context
        self._address = address
        self._keys = keys
        self._join = terms.join(home, silence_s)
        self._on_event = on_event
        self._is_joined = asyncio.Event()
        self._session = Session(0)
        self._socket: zmq.asyncio.Socket | None = None
        self._workers: dict[Sender, RemoteWorker] = {}

    async def run(self) -> None:
        """For ever. Cancelled, it leaves: the host ends our workers at once."""
        while True:
            try:
                with self._connected():
                    await self._attend()
            except LinkLost as lost:
                if self._is_joined.is_set() or self.trouble != str(lost):
                    logger.error("the link to %s is down: %s", self.name, lost)
                self.trouble = str(lost)
            except asyncio.CancelledError:
                self.trouble = "we leave"
                raise
            finally:
                self._is_joined.clear()
                self._end_all()
            await asyncio.sleep(RETRY_S)

    @property
    def is_joined(self) -> bool:
        return self._is_joined.is_set()

    async def until_joined(self) -> None:
        await self._is_joined.wait()

    async def start(self, config: WorkerConfig) -> RemoteWorker:
        """Raises OSError: it cannot be started there now."""
        worker = RemoteWorker(config, self)
        try:
            self.send(Spawn(config))
        except PeerGone as error:
            raise OSError(str(error)) from error
        self._workers[config.name, config.epoch] = worker
        await worker.until_started()
        return worker

    def send(self, message: FromHome) -> None:
        """Never waits.

        Raises:
            PeerGone: the node is not joined.
        """
        if not self._is_joined.is_set():
            raise PeerGone(f"{self.name} is not joined: {self.trouble}")
        self._put(message)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """A socket and a session of its own: nothing of an earlier one can come in."""
        self._session = Session(secrets.randbits(63))
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, node_messages.MAX_LINK_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        call_with(self._socket, self._keys.public, self._keys)
        self._socket.connect(self._address)
        try:
            yield
        except asyncio.CancelledError:
            self._put(Leave())
            raise
        finally:
            self._socket.close()
            self._socket = None

    async def _attend(self) -> None:
        """One session, from `Join` to its end. Raises LinkLost.

        The host kills our workers when `silence_s` have passed since a ping of which it has our
        answer. The last message that we had came after that ping was sent, and once we give up
        we answer no more: so when we have heard nothing for as long and a bit more, our workers
        there have been killed. Where its daemon is itself stopped, it cannot; then a worker ends
        since its leader, which we kill here, is gone, and what it may still read of a pool of
        its own node until then goes nowhere, because its epoch is heard no more.
        """
        self._put(self._join)
        patience_s = self._join.silence_s + KILLED_WITHIN_S
        while True:
            assert self._socket is not None
            try:
                async with asyncio.timeout(patience_s):
                    frames = await self._socket.recv_multipart()
            except TimeoutError:
                raise LinkLost(f"nothing heard for {patience_s:g} s") from None
            try:
                message = node_messages.from_host(frames)
                if node_messages.session_of(frames) == self._session.number:
                    self._on_message(message, frames)
            except WireError as error:
                raise LinkLost(str(error)) from error
            # A receive that finds a message does not yield; who waits for a worker's start is to
            # have it before the worker's next word is heard.
            await asyncio.sleep(0)

    def _on_message(self, message: FromHost, frames: list[bytes]) -> None:
        if isinstance(message, Evicted):  # who knows no session cannot number it
            raise LinkLost(message.reason)
        self._session.check(frames)
        match message:
            case Joined():
                logger.info("%s joined", self.name)
                self._is_joined.set()
            case Rejected(reason):
                raise LinkLost(f"it refuses us: {reason}")
            case Started(worker, epoch, pid):
                self._workers[worker, epoch].started(pid)
            case Said(worker, epoch, event):
                self._on_event(worker, epoch, event)
            case Ended(worker, epoch, how):
                self._workers.pop((worker, epoch)).end(how)
            case Ping(sent_s):
                self._put(Pong(sent_s))
            case _:
                assert_never(message)

    def _end_all(self) -> None:
        """The session is over: see `_attend` for why nothing of it lives on."""
        for worker in self._workers.values():
            worker.end(f"lost with {self.name}: {self.trouble}")
        self._workers.clear()

    def _put(self, message: FromHome) -> None:
        assert self._socket is not None
        # pyzmq tries at once, so the future is done.
        sent = self._socket.send_multipart(self._session.pack(message), zmq.NOBLOCK)
        cast("asyncio.Future[object]", sent).result()
