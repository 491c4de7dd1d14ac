"""One life of one instance: its worker processes from start to reaping, under one epoch."""

import asyncio
import logging

from daemon.worker_process import WorkerProcess
from ipc.channel import ChannelClosed
from ipc.messages import Broken, Exit, Hello, Loading, Ready
from ipc.sockets import DaemonSocket, PeerGone
from ipc.vocabulary import InstanceSpec, WorkerName

logger = logging.getLogger(__name__)

StartEvent = Hello | Loading | Broken | Ready


class Incarnation:
    """Knows its processes and how far each has come; tells when all are ready and why it ended."""

    def __init__(self, spec: InstanceSpec, epoch: int, link: DaemonSocket) -> None:
        self.spec = spec
        self.epoch = epoch
        self.workers: dict[WorkerName, WorkerProcess] = {}
        self.ready: dict[WorkerName, Ready] = {}
        self.progress = "starting"
        self.is_hopeless = False
        self._link = link
        self._all_ready = asyncio.Event()
        self._doom: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def leader(self) -> WorkerName:
        return WorkerName(self.spec.name)

    @property
    def is_ready(self) -> bool:
        return self._all_ready.is_set()

    def join(self, name: WorkerName, process: WorkerProcess) -> None:
        self.workers[name] = process

    def doom(self, reason: str) -> None:
        """End this life; the first reason counts."""
        if not self._doom.done():
            self._doom.set_result(reason)

    def on_event(self, worker: WorkerName, event: StartEvent) -> None:
        match event:
            case Hello():
                self.progress = "loading"
            case Loading(stage, fraction):
                self.progress = f"{stage} {fraction:.0%}"
            case Broken(reason):
                self.is_hopeless = True
                self.doom(reason)
            case Ready():
                self._became_ready(worker, event)

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
        return await next(w for w in self.workers.values() if w.has_ended).ended()

    def tell_to_exit(self) -> None:
        for name in self.workers:
            try:
                self._link.send(name, self.epoch, Exit())
            except PeerGone:
                continue

    async def bury(self) -> None:
        """Kill and reap every process and give back what we hold of them."""
        for name, process in self.workers.items():
            process.kill()
            self._link.close_epoch(name, self.epoch)
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
        if len(self.ready) == len(self.workers):
            self.progress = "ready"
            self._all_ready.set()
