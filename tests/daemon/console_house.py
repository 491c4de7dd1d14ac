"""A node that is played, behind a real admin socket, and consoles that ask it."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from daemon import admin_protocol, console
from daemon.admin_commands import Drain, GetEvents, GetStatus, Order, Question, Undrain, Waiting
from daemon.admin_console import AdminConsole, RefusedByState
from daemon.admin_door import Door, LocalDoor
from daemon.admin_protocol import Answer, Done, EventsAre, Request, StatusIs, WouldDo
from daemon.admin_views import BlockCounts, InstanceStatus, NodeState, Status, WorkerStatus
from ipc.vocabulary import Role


def status_of(state: NodeState, model: str = "smollm2") -> Status:
    return Status(
        state=state,
        model=model,
        version="0.1.0",
        pid=77,
        uptime_s=90_061.5,
        requests={"queued": 0, "prefill": 1, "decode": 12},
        instances=(
            InstanceStatus(
                name="p0",
                role=Role.PREFILL,
                state="ready",
                pid=78,
                epoch=2**63,
                restarts=1,
                last_exit="signal 9",
                queue_tokens=512,
                blocks=BlockCounts(total=100, free=60, held=30, in_use=10),
                kernels="[bold]cpu",
            ),
            InstanceStatus(
                name="d0",
                role=Role.DECODE,
                state="ready",
                tp=2,
                workers=(WorkerStatus(0, 0, 4, 81_234), WorkerStatus(0, 1, 5, 81_235)),
            ),
        ),
    )


class PlayedOperator:
    """A node whose drain ends when a test says so, and that answers what the test laid out."""

    def __init__(self) -> None:
        self.state = NodeState.READY
        self.model = "smollm2"
        self.drained = asyncio.Event()
        self.heard: list[Question | Waiting | Order] = []
        self.answers: dict[type, Answer] = {}
        self.bug: Exception | None = None

    @property
    def orders(self) -> list[Order]:
        return [c for c in self.heard if isinstance(c, Order) and not c.dry_run]

    def answer(self, question: Question) -> Answer:
        self.heard.append(question)
        if self.bug is not None:
            raise self.bug
        if isinstance(question, GetStatus):
            return StatusIs(status_of(self.state, self.model))
        return self.answers[type(question)]

    async def carry_out(self, command: Waiting | Order) -> Answer:
        self.heard.append(command)
        match command:
            case _ if type(command) in self.answers:
                return self.answers[type(command)]
            case GetEvents():
                return EventsAre((), 0, 0)
            case Drain(dry_run=True):
                return WouldDo(("the node would take nothing new",))
            case Drain(deadline_s):
                self.state = NodeState.DRAINING
                async with asyncio.timeout(deadline_s):
                    await self.drained.wait()
            case Undrain():
                if self.state is not NodeState.DRAINING:
                    raise RefusedByState("the node is not draining")
                self.state = NodeState.READY
        return Done("it is done")


class House:
    """A served admin socket, and consoles that run in threads as they do in a terminal."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.operator = PlayedOperator()
        self.context = zmq.asyncio.Context()
        self.threads = ThreadPoolExecutor(max_workers=2)
        self.dealers: list[zmq.asyncio.Socket] = []
        self.serving: list[asyncio.Task[None]] = []
        self.serve(LocalDoor(self.context, run_dir / "admin.ipc"))

    def serve(self, door: Door) -> None:
        served = AdminConsole(door, self.operator)
        self.serving.append(asyncio.ensure_future(served.serve()))

    async def run(self, *argv: str, wait: Callable[[float], None] | None = None) -> int:
        arguments = [*argv, "--run-dir", str(self.run_dir)]
        run = console.main if wait is None else lambda argv: console.main(argv, wait)
        return await asyncio.get_running_loop().run_in_executor(self.threads, run, arguments)

    def dealer(self, name: str = "admin.ipc", *, room: int = 1000) -> zmq.asyncio.Socket:
        """A console that a test drives by hand; `room` is how many answers it takes unread."""
        socket: zmq.asyncio.Socket = self.context.socket(zmq.DEALER)
        self.dealers.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, room)
        socket.connect(f"ipc://{self.run_dir / name}")
        return socket

    async def close(self) -> None:
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
        for socket in self.dealers:
            socket.close()
        self.threads.shutdown()
        self.context.destroy(linger=0)


async def ask(socket: zmq.asyncio.Socket, *frames: bytes) -> dict[str, Any]:
    await socket.send_multipart(frames)
    reply: dict[str, Any] = json.loads(await socket.recv())
    return reply


def request_of(command: Question | Waiting | Order, call_id: int = 1) -> bytes:
    return admin_protocol.encode(Request(admin_protocol.ADMIN_VERSION, call_id, command))


def status_request(call_id: int = 1) -> bytes:
    return request_of(GetStatus(), call_id)
