"""The host's end of links between nodes: workers of instances whose home is another daemon.

It starts and kills them, passes descriptors of pools of this node from one to the other, and
reports what they say at their start and when they are reaped; all else they hear from their
leader. A home that is silent for its bound loses its workers here.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import assert_never, cast

import zmq
import zmq.asyncio

from daemon import node_messages
from daemon.config_errors import reason_of
from daemon.link_terms import Terms
from daemon.node_messages import (
    Ended,
    Evicted,
    FromHost,
    Join,
    Joined,
    Kill,
    Leave,
    Lend,
    Order,
    Ping,
    Pong,
    Rejected,
    Said,
    Session,
    Spawn,
    Started,
    Tell,
)
from daemon.worker_process import WorkerProcess
from ipc.channel import ChannelClosed
from ipc.codec import WireError
from ipc.curve import ZAP_ENDPOINT, CurveKeys, ask_at_the_door, door_answer, listen_with
from ipc.messages import Broken, Event, Hello, Loading, Ready, Released, Tokens, WorkerConfig
from ipc.sockets import DaemonSocket, PeerGone, Sender

logger = logging.getLogger(__name__)

PINGS_PER_BOUND = 5
_LAST_WORDS_MS = 200

StartEvent = Hello | Loading | Broken | Ready | Released


class Guest:
    """A home in one session, and its workers here. The session begins with its `Join`."""

    def __init__(self, identity: bytes, session: Session, join: Join) -> None:
        self.identity = identity
        self.session = session
        self.home = join.home
        self.silence_s = join.silence_s
        self.workers: dict[Sender, WorkerProcess] = {}
        self.alive_s = time.monotonic()
        self.is_over = False

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.alive_s > self.silence_s


class SegmentHost:
    """Hosts segments for other nodes; bound when made, `serve` until cancelled.

    Args:
        link: the socket of this node's workers.
        settle: fills in what a worker's configuration has of this machine.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        keys: CurveKeys,
        link: DaemonSocket,
        *,
        terms: Terms,
        settle: Callable[[WorkerConfig], WorkerConfig],
        start_worker: Callable[[WorkerConfig], Awaitable[WorkerProcess]] = WorkerProcess.start,
    ) -> None:
        self._keys = keys
        self._link = link
        self._terms = terms
        self._settle = settle
        self._start_worker = start_worker
        self._guests: dict[int, Guest] = {}
        self._door: zmq.asyncio.Socket = context.socket(zmq.REP)
        self._door.bind(ZAP_ENDPOINT)
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, node_messages.MAX_LINK_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        listen_with(self._socket, keys)
        ask_at_the_door(self._socket)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.on_change: Callable[[], None] = lambda: None

    @property
    def progress(self) -> str:
        """Whose workers are here, in one line."""
        hosted = [f"{len(guest.workers)} of {guest.home}" for guest in self._guests.values()]
        return f"it hosts workers of instances of other nodes: {', '.join(hosted) or 'none yet'}"

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_the_door())
            tasks.create_task(self._keep_time())
            while True:
                frames = await self._socket.recv_multipart()
                await self._on_frames(frames[0], frames[1:], tasks)

    async def stop(self) -> None:
        """Kill and reap everybody; their homes are told."""
        for guest in list(self._guests.values()):
            await self._evict(guest, "the node stops")

    def close(self) -> None:
        self._socket.close()
        self._door.close()

    def hosts(self, worker: Sender) -> bool:
        return self._guest_of(worker) is not None

    def on_event(self, worker: Sender, event: Event | Tokens) -> None:
        """A worker of a guest has said something."""
        guest = self._guest_of(worker)
        if guest is None or not isinstance(event, StartEvent):  # all else is a leader's
            return
        if isinstance(event, Ready):
            try:
                guest.workers[worker].take_pool()
            except ChannelClosed:
                return  # its end is on the way
        self._say(guest, Said(*worker, event))

    def on_broken_link(self, worker: Sender, reason: str) -> None:
        """A stream that lost a message can never be trusted again."""
        guest = self._guest_of(worker)
        if guest is not None:
            logger.error("%s is killed: its link broke: %s", worker[0], reason)
            guest.workers[worker].kill()

    async def _keep_the_door(self) -> None:
        while True:
            question = await self._door.recv_multipart()
            await self._door.send_multipart(door_answer(question, self._keys))

    async def _keep_time(self) -> None:
        """Ask every home whether it is there; a silent one's workers are killed.

        Home answers a ping with the ping's own time, so `alive_s` is a moment at which home was
        not yet silent, however late an answer is read: a daemon that was stopped and goes on
        finds old answers in its socket, and kills at once.
        """
        while True:
            bounds = [guest.silence_s for guest in self._guests.values()]
            await asyncio.sleep(min(bounds, default=1.0) / PINGS_PER_BOUND)
            for guest in list(self._guests.values()):
                if guest.is_silent:
                    silence = f"{guest.home} was silent for {guest.silence_s:g} s"
                    await self._evict(guest, silence)
                else:
                    self._say(guest, Ping(time.monotonic()))

    async def _on_frames(
        self, identity: bytes, frames: list[bytes], tasks: asyncio.TaskGroup
    ) -> None:
        try:
            number, message = node_messages.session_of(frames), node_messages.from_home(frames)
            if isinstance(message, Join):
                newcomer = Guest(identity, Session(number), message)
                newcomer.session.check(frames)
        except WireError as error:
            logger.warning("a daemon that is not of this protocol: %s", error)
            return
        if isinstance(message, Join):
            await self._join(newcomer, message)
            return
        guest = self._guests.get(number)
        if guest is None:
            unknown = Evicted("the other node knows no such session")
            self._send(identity, Session(number).pack(unknown))
            return
        try:
            guest.session.check(frames)
        except WireError as error:
            await self._evict(guest, f"the link lost something: {error}")
        else:
            await self._obey(guest, message, tasks)

    async def _join(self, guest: Guest, join: Join) -> None:
        """What an earlier session of the same home left is ended before the new one stands."""
        for earlier in [g for g in self._guests.values() if g.home == guest.home]:
            await self._evict(earlier, f"{guest.home} joined again")
        if (objection := self._terms.objection(join)) is not None:
            logger.error("%s cannot join: %s", guest.home, objection)
            self._say(guest, Rejected(objection))
            return
        self._guests[guest.session.number] = guest
        logger.info("%s joined: workers of its instances may run here", guest.home)
        self._say(guest, Joined())
        self.on_change()

    async def _obey(self, guest: Guest, order: Order, tasks: asyncio.TaskGroup) -> None:
        match order:
            case Spawn(config):
                await self._spawn(guest, config, tasks)
            case Kill(worker, epoch):
                if (process := guest.workers.get((worker, epoch))) is not None:
                    process.kill()
            case Lend(worker, epoch, pool):
                reader = guest.workers.get((worker, epoch))
                owner = guest.workers.get((pool.worker, pool.epoch))
                if reader is not None and owner is not None:  # else its end is on the way
                    reader.give_pool(pool, owner.pool_descriptor)
            case Tell(worker, epoch, command):
                with contextlib.suppress(PeerGone):  # its end is on the way
                    self._link.send(worker, epoch, command)
            case Pong(sent_s):
                guest.alive_s = max(guest.alive_s, sent_s)
            case Leave():
                await self._evict(guest, "home left")
            case _:
                assert_never(order)

    async def _spawn(self, guest: Guest, config: WorkerConfig, tasks: asyncio.TaskGroup) -> None:
        worker = (config.name, config.epoch)
        self._link.open_epoch(*worker)
        try:
            process = await self._start_worker(self._settle(config))
        except OSError as error:  # no descriptors, no memory: perhaps later
            self._link.close_epoch(*worker)
            self._say(guest, Ended(*worker, f"cannot be started: {reason_of(error)}"))
            return
        guest.workers[worker] = process
        tasks.create_task(self._reap(guest, worker, process))
        if guest.is_over:  # while the process was made
            process.kill()
        logger.info("%s of %s started, process %d", config.name, guest.home, process.pid)
        self._say(guest, Started(*worker, process.pid))
        self.on_change()

    async def _reap(self, guest: Guest, worker: Sender, process: WorkerProcess) -> None:
        how = await process.ended()
        self._link.close_epoch(*worker)
        process.close()
        del guest.workers[worker]
        logger.info("%s of %s ended: %s", worker[0], guest.home, how)
        self._say(guest, Ended(*worker, how))
        self.on_change()

    async def _evict(self, guest: Guest, reason: str) -> None:
        """End a session and all that lives in it."""
        guest.is_over = True
        if self._guests.pop(guest.session.number, None) is None:
            return
        processes = list(guest.workers.values())
        if processes:
            logger.error("%d workers of %s are killed: %s", len(processes), guest.home, reason)
        for process in processes:
            process.kill()
        for process in processes:
            await process.ended()
        self._say(guest, Evicted(reason))
        self.on_change()

    def _guest_of(self, worker: Sender) -> Guest | None:
        return next((g for g in self._guests.values() if worker in g.workers), None)

    def _say(self, guest: Guest, message: FromHost) -> None:
        self._send(guest.identity, guest.session.pack(message))

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        """To a home, if it is connected: that it is not shows in its silence."""
        with contextlib.suppress(zmq.ZMQError):
            # pyzmq tries at once, so the future is done.
            sent = self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
            cast("asyncio.Future[object]", sent).result()
