"""One life of one instance: its worker processes from start to reaping, under one epoch."""

import asyncio
import contextlib
import logging

from daemon.remote_node import RemoteWorker
from daemon.worker_process import WorkerProcess
from ipc.channel import ChannelClosed
from ipc.messages import (
    Audit,
    Broken,
    Command,
    Exit,
    Hello,
    Loading,
    Ready,
    Released,
    StartEvent,
)
from ipc.sockets import DaemonSocket, PeerGone
from ipc.vocabulary import InstanceSpec, WorkerName

logger = logging.getLogger(__name__)

Process = WorkerProcess | RemoteWorker

# Block ids are an instance's: every rank's pool must have the same blocks.
_SHARED_FIELDS = ("num_blocks", "block_size", "head_dim", "dtype")


class Incarnation:
    """Knows its processes and how far each has come; tells when all are ready and why it ended.

    `is_up` is the supervisor's: it has been announced, to its peers and to the controller.
    """

    def __init__(self, spec: InstanceSpec, epoch: int, link: DaemonSocket) -> None:
        self.spec = spec
        self.epoch = epoch
        self.workers: dict[WorkerName, Process] = {}
        self.ready: dict[WorkerName, Ready] = {}
        self.is_hopeless = False
        self.is_up = False
        self._link = link
        self._progress: dict[WorkerName, tuple[float, str]] = {}
        self._lent: set[tuple[WorkerName, str, int]] = set()
        self._all_ready = asyncio.Event()
        self._doom: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def names(self) -> list[WorkerName]:
        """All that belong to it, the leader first, whether or not they have been started."""
        return [
            WorkerName(self.spec.name, stage, tp_rank)
            for stage, segment in enumerate(self.spec.segments)
            for tp_rank in range(len(segment.devices))
        ]

    @property
    def leader(self) -> WorkerName:
        return WorkerName(self.spec.name)

    @property
    def workers_here(self) -> list[WorkerName]:
        """Those that hear us themselves and not through the daemon of their node."""
        return [n for n, process in self.workers.items() if not isinstance(process, RemoteWorker)]

    @property
    def is_ready(self) -> bool:
        return self._all_ready.is_set()

    @property
    def is_ending(self) -> bool:
        """It is doomed, or one of its processes has ended: the others follow."""
        return self._doom.done() or any(worker.has_ended for worker in self.workers.values())

    @property
    def progress(self) -> str:
        """Of the worker that is furthest behind."""
        return min(self._progress.get(name, (-1.0, "starting")) for name in self.names)[1]

    def join(self, name: WorkerName, process: Process) -> None:
        self.workers[name] = process

    def doom(self, reason: str) -> None:
        """End this life; the first reason counts."""
        if not self._doom.done():
            self._doom.set_result(reason)

    def give_up(self, reason: str) -> None:
        """The same, and another try would end the same way."""
        self.is_hopeless = True
        self.doom(reason)

    def on_event(self, worker: WorkerName, event: StartEvent) -> None:
        match event:
            case Hello():
                self._progress[worker] = (0.0, "loading")
            case Loading(stage, fraction):
                self._progress[worker] = (fraction, f"{stage} {fraction:.0%}")
            case Broken(reason):
                self.give_up(reason)
            case Ready():
                self._became_ready(worker, event)
            case Released(instance, epoch):
                self._lent.discard((worker, instance, epoch))

    def lend(self, reader: WorkerName, instance: str, epoch: int) -> None:
        """One of our workers is told how to open pools of another incarnation."""
        self._lent.add((reader, instance, epoch))

    def may_read(self, other: "Incarnation") -> bool:
        """Whether a worker of ours may still have a pool of that one open."""
        return any(lent[1:] == (other.spec.name, other.epoch) for lent in self._lent)

    @property
    def is_on_device(self) -> bool:
        """Whether its pools are a device's memory."""
        return any(ready.is_device_memory for ready in self.ready.values())

    async def until_ready(self) -> None:
        await self._all_ready.wait()

    async def until_over(self) -> str:
        """Wait for the first process to end, or for doom; why, in words."""
        ends = [asyncio.ensure_future(w.ended()) for w in self.workers.values()]
        try:
            await asyncio.wait([*ends, self._doom], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if self._doom.done():
            return self._doom.result()
        name = next(name for name, worker in self.workers.items() if worker.has_ended)
        how = await self.workers[name].ended()
        return how if len(self.names) == 1 else f"{name} {how}"

    @property
    def culprit(self) -> WorkerName:
        """Whose end was the end of all, before they are buried; of a doom, the leader."""
        return next((n for n, worker in self.workers.items() if worker.has_ended), self.leader)

    def tell(self, name: WorkerName, command: Command) -> None:
        """Raises PeerGone: that worker, or the way to its node, is no more."""
        process = self.workers[name]
        if isinstance(process, RemoteWorker):
            process.tell(command)
        else:
            self._link.send(name, self.epoch, command)

    def ask(self, beat: int) -> None:
        """Have every worker here answer this beat."""
        for name in self.workers_here:
            with contextlib.suppress(PeerGone):  # its end is on the way
                self.tell(name, Audit(beat, logging.getLogger().level))

    def tell_to_exit(self) -> None:
        for name in self.workers:
            with contextlib.suppress(PeerGone):
                self.tell(name, Exit())

    async def bury(self) -> None:
        """Kill and reap every process and give back what we hold of them.

        Those of other nodes too: until the last is reaped, or must have been, this epoch is
        ending, and the blocks that it may read are held.
        """
        for name in self.names:
            self._link.close_epoch(name, self.epoch)
        for process in self.workers.values():
            process.kill()
        for process in self.workers.values():
            await process.ended()
            process.close()

    def _became_ready(self, worker: WorkerName, event: Ready) -> None:
        try:
            self.workers[worker].take_pool()
        except ChannelClosed as error:
            self.doom(f"{worker} left before its pool was taken: {error}")
            return
        self.ready[worker] = event
        self._progress[worker] = (2.0, "ready")
        if len(self.ready) < len(self.names):
            return
        if (reason := self._disagreement()) is not None:
            self.give_up(reason)
            return
        self._all_ready.set()

    def _disagreement(self) -> str | None:
        """How the ranks' pools differ in what must be the same."""
        first = self.ready[self.leader].layout
        for name, event in self.ready.items():
            for field in _SHARED_FIELDS:
                ours, theirs = getattr(first, field), getattr(event.layout, field)
                if ours != theirs:
                    return f"{field} differs: {ours} on {self.leader}, {theirs} on {name}"
        return None
