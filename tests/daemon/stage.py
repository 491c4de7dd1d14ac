"""A real supervisor and controller of one mixed instance, whose processes are played."""

import asyncio
from collections.abc import Awaitable, Callable

from daemon.admission import Capacity
from daemon.config import DaemonConfig
from daemon.controller import Controller
from daemon.metrics import Metrics
from daemon.supervisor import Supervisor, Ward
from daemon.text import Tokenizer
from daemon.worker_process import WorkerProcess
from ipc.kv_layout import RankLayout, Span
from ipc.messages import Broken, Hello, Ready, WorkerConfig
from ipc.sockets import DaemonSocket
from ipc.vocabulary import DType

LAYOUT = RankLayout(Span(0, 1), Span(0, 1), 8, 4, 1, DType.FP32)


class PlayedProcess(WorkerProcess):
    """A worker process without a process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.pool_descriptor = None
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return 4711

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    def take_pool(self) -> None:
        """Nobody reads it."""

    def kill(self) -> None:
        self.end("killed by SIGKILL")

    def end(self, how: str) -> None:
        if not self._end.done():
            self._end.set_result(how)

    def close(self) -> None:
        """Nothing is held."""


class Stage:
    """A supervisor of one mixed instance, and the processes that it starts, in order."""

    def __init__(self, link: DaemonSocket, tokenizer: Tokenizer) -> None:
        self.metrics = Metrics("test")
        self.controller = Controller(tokenizer, self.metrics, Capacity(64), max_queued=8)
        self.started: asyncio.Queue[PlayedProcess] = asyncio.Queue()
        self.spawn_error: OSError | None = None  # of the next start alone
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.supervisor = Supervisor(
            DaemonConfig(prefill=0, decode=0, mixed=1),
            link,
            self.controller,
            self.metrics,
            max_context_tokens=64,
            num_token_ids=256,
            start_worker=self._start,
        )

    @property
    def ward(self) -> Ward:
        return self.supervisor.wards["mixed-0"]

    def keep(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.supervisor.keep(self.ward))

    def say(self, process: PlayedProcess, event: Hello | Broken | Ready) -> None:
        self.supervisor.on_event(process.config.name, process.config.epoch, event)

    async def ready(self) -> PlayedProcess:
        """The next process, once it has said that it can serve."""
        process = await self.started.get()
        up = asyncio.Event()
        self.supervisor.on_change = lambda: (
            up.set() if self.controller.instances.can_serve else None
        )
        self.say(process, Ready(LAYOUT, "played", 0.1))
        await up.wait()
        return process

    async def _start(self, config: WorkerConfig) -> WorkerProcess:
        await self.may_start.wait()
        if (error := self.spawn_error) is not None:
            self.spawn_error = None
            raise error
        process = PlayedProcess(config)
        self.started.put_nowait(process)
        return process


MakeStage = Callable[[], Awaitable[Stage]]
