"""Both ends of a link between nodes, over real encrypted sockets; hosted processes are played."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from daemon.link_terms import Terms
from daemon.node_messages import Evicted, FromHome, FromHost, Session, from_host
from daemon.remote_node import RemoteNode
from daemon.segment_host import SegmentHost
from daemon.worker_process import WorkerProcess
from ipc.curve import CurveKeys, call_with, new_keys
from ipc.messages import Ready, WorkerConfig
from ipc.vocabulary import DType, Parallelism, Role, WorkerName
from tests.daemon.stage import OverheardLink, PlayedProcess, layout_of

SILENCE_S = 0.6
KEYS = new_keys()
TERMS = Terms("placement", "model")
PATIENCE_S = 5.0


def worker_config(name: WorkerName, epoch: int = 7) -> WorkerConfig:
    """Of one of two stages."""
    return WorkerConfig(
        name=name,
        epoch=epoch,
        role=Role.MIXED,
        parallelism=Parallelism(1, 2),
        endpoint="at home",
        model_dir="at home",
        dtype=DType.FP32,
        kv_bytes=1,
        block_size=4,
        max_context_tokens=64,
        prefill_tokens=64,
        max_batch=16,
    )


class Host:
    """A node that hosts segments."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.link = OverheardLink(context, f"ipc://{directory}/host")
        self.started: asyncio.Queue[PlayedProcess] = asyncio.Queue()
        self.spawn_errors: list[OSError] = []  # of the next starts
        self._pids = count(1234)
        self.segments = SegmentHost(
            context,
            "tcp://127.0.0.1:*",
            KEYS,
            self.link,
            terms=TERMS,
            settle=self._settle,
            start_worker=self._start,
        )
        self.serve()

    def serve(self) -> None:
        self.serving = asyncio.ensure_future(self.segments.serve())

    @property
    def address(self) -> str:
        return self.segments.address

    def say_ready(self, process: PlayedProcess) -> None:
        config = process.config
        self.segments.on_event((config.name, config.epoch), Ready(layout_of(config), "played", 0.1))

    async def close(self) -> None:
        self.serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.serving
        self.segments.close()
        self.link.close()

    def _settle(self, config: WorkerConfig) -> WorkerConfig:
        return msgspec.structs.replace(config, endpoint=self.link.endpoint, model_dir="here")

    async def _start(self, config: WorkerConfig) -> WorkerProcess:
        if self.spawn_errors:
            raise self.spawn_errors.pop(0)
        process = PlayedProcess(config, next(self._pids))
        self.started.put_nowait(process)
        return process


class Home:
    """A node's own end of its link to a host, and what it heard of workers there."""

    def __init__(self, context: zmq.asyncio.Context, address: str, **how: Any) -> None:
        self.heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        how = {"home": "n0", "terms": TERMS, "silence_s": SILENCE_S} | how
        keys = how.pop("keys", KEYS)
        on_event = how.pop("on_event", lambda *said: self.heard.put_nowait(said))
        self.node = RemoteNode(context, "n1", address, keys, on_event=on_event, **how)
        self.running = asyncio.ensure_future(self.node.run())

    async def joined(self) -> RemoteNode:
        await asyncio.wait_for(self.node.until_joined(), PATIENCE_S)
        return self.node

    async def close(self) -> None:
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.running


class BareHome:
    """Somebody who speaks the protocol, but not as a home should."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, keys: CurveKeys | None = KEYS
    ) -> None:
        self.session = Session(99)
        self.socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            call_with(self.socket, KEYS.public, keys)
        self.socket.connect(address)

    async def say(self, message: FromHome) -> None:
        await self.socket.send_multipart(self.session.pack(message))

    async def hear(self, kind: type[FromHost]) -> FromHost:
        """The next message of that kind."""
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(message := from_host(await self.socket.recv_multipart()), kind):
                continue
        return message

    async def evicted(self) -> str:
        message = await self.hear(Evicted)
        assert isinstance(message, Evicted)
        return message.reason


@asynccontextmanager
async def contexts() -> AsyncIterator[tuple[zmq.asyncio.Context, zmq.asyncio.Context]]:
    """One for each node: a doorkeeper answers for all of a context."""
    home, host = zmq.asyncio.Context(), zmq.asyncio.Context()
    try:
        yield home, host
    finally:
        home.destroy(0)
        host.destroy(0)
