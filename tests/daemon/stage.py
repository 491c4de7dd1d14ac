"""A real supervisor and controller of the instances that a test counts; processes are played."""

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec

from daemon.admission import Capacity
from daemon.config import DaemonConfig
from daemon.controller import Controller
from daemon.door import Door
from daemon.meeting_points import MeetingPoints
from daemon.metrics import Metrics
from daemon.neighbours import Neighbours
from daemon.placement import counted_out
from daemon.quarantine import Quarantine
from daemon.supervisor import Supervisor
from daemon.text import Tokenizer
from daemon.ward import Ward
from daemon.worker_configs import WorkerConfigs
from daemon.worker_process import WorkerProcess
from ipc.channel import PoolDescriptor
from ipc.kv_layout import RankLayout
from ipc.messages import Command, Exit, Ready, StartEvent, WorkerConfig
from ipc.sharding import ModelSizes, shard
from ipc.sockets import DaemonSocket
from ipc.vocabulary import DType, Placement, WorkerName

MODEL = ModelSizes(
    name="played",
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    hidden_size=4,
    intermediate_size=8,
    vocab_size=2,
)


def layout_of(config: WorkerConfig, **changes: object) -> RankLayout:
    """The pool of one worker of the played model."""
    own = shard(MODEL, config.parallelism, config.name.stage, config.name.tp_rank)
    layout = RankLayout(own.layers, own.kv_heads, 8, 4, 1, DType.FP32)
    return msgspec.structs.replace(layout, **changes)


class PlayedProcess(WorkerProcess):
    """A worker process without a process."""

    def __init__(self, config: WorkerConfig, pid: int) -> None:
        self.config = config
        self.pool_descriptor: int | None = None
        self.given: list[PoolDescriptor] = []
        self._pid = pid
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    def take_pool(self) -> None:
        self.pool_descriptor = self._pid  # nobody reads it

    def give_pool(self, about: PoolDescriptor, descriptor: int | None) -> None:
        self.given.append(about)

    def kill(self) -> None:
        self.end("killed by SIGKILL")

    def end(self, how: str) -> None:
        if not self._end.done():
            self._end.set_result(how)

    def close(self) -> None:
        """Nothing is held."""


class OverheardLink(DaemonSocket):
    """A real socket that keeps what is sent on it: no played process is connected."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.sent: list[tuple[WorkerName, Command]] = []
        self.has_sent = asyncio.Event()
        self.on_sent: Callable[[int, Command], None] = lambda epoch, command: None

    def send(self, worker: WorkerName, epoch: int, command: Command) -> None:
        self.sent.append((worker, command))
        self.has_sent.set()
        self.on_sent(epoch, command)


class Stage:
    """A supervisor and the processes that it starts, in order."""

    def __init__(
        self,
        link: OverheardLink,
        tokenizer: Tokenizer,
        config: DaemonConfig,
        placement: Placement | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.link = link
        self.processes: list[PlayedProcess] = []
        link.on_sent = self._obey
        self.metrics = Metrics("test")
        self.capacity = Capacity(64)
        self.controller = Controller(tokenizer, self.metrics, Door(self.capacity, max_queued=8))
        self.run_dir = Path(link.endpoint.removeprefix("ipc://")).parent
        self.started: asyncio.Queue[PlayedProcess] = asyncio.Queue()
        self.spawn_errors: list[OSError | None] = []  # of the next starts
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._pids = count(4711)
        self.config = config
        self.configs = WorkerConfigs(
            config,
            placement or counted_out(config),
            endpoint=link.endpoint,
            meeting_points=MeetingPoints(self.run_dir, "127.0.0.1"),
            max_context_tokens=64,
            num_token_ids=256,
        )
        self.supervisor = Supervisor(
            self.configs,
            link,
            self.controller,
            self.metrics,
            start_timeout_s=60.0,
            start_worker=self._start,
            neighbours=neighbours,
            quarantine=Quarantine(config.quarantine_deaths),
        )

    @property
    def ward(self) -> Ward:
        """The first instance's."""
        return next(iter(self.supervisor.wards.values()))

    def keep(self, ward: Ward | None = None) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.supervisor.keep(ward or self.ward))

    def keep_all(self) -> "asyncio.Future[list[None]]":
        return asyncio.gather(*(self.keep(ward) for ward in self.supervisor.wards.values()))

    def say(self, process: PlayedProcess, event: StartEvent) -> None:
        self.supervisor.on_event(process.config.name, process.config.epoch, event)

    def say_ready(self, process: PlayedProcess, **changes: object) -> None:
        self.say(process, Ready(layout_of(process.config, **changes), "played", 0.1))

    async def ready(self) -> PlayedProcess:
        """The next process, once it has said that it can serve."""
        (process,) = await self.all_ready(1)
        return process

    async def all_ready(self, num_workers: int) -> list[PlayedProcess]:
        """The next processes, once they have said that they can serve and their instances can."""
        processes = [await self.started.get() for _ in range(num_workers)]
        for process in processes:
            self.say_ready(process)
        wards = [self.supervisor.wards[process.config.name.instance] for process in processes]
        await self.until(lambda: all(ward.is_ready for ward in wards))
        return processes

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that comes with a change of an instance."""
        changed = asyncio.Event()
        self.supervisor.on_change = changed.set
        while not holds():
            await changed.wait()
            changed.clear()

    def _obey(self, epoch: int, command: Command) -> None:
        """Workers leave when they are told to."""
        for process in self.processes:
            if isinstance(command, Exit) and process.config.epoch == epoch:
                process.end("exit code 0")

    async def _start(self, config: WorkerConfig) -> WorkerProcess:
        await self.may_start.wait()
        if self.spawn_errors and (error := self.spawn_errors.pop(0)) is not None:
            raise error
        process = PlayedProcess(config, next(self._pids))
        self.processes.append(process)
        self.started.put_nowait(process)
        return process


class MakeStage(Protocol):
    """One mixed instance where nothing else is counted."""

    async def __call__(self, *, neighbours: Neighbours | None = None, **counts: int) -> Stage: ...
