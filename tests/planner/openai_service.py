"""An OpenAI-compatible service on a real socket that does as it is told, and nothing by itself.

A plan says, request by request, what goes out: bytes, an event to wait for, or the seconds that a
step of it takes. Requests that no plan is left for get a good answer, the small one that a bench
sends ahead too.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

Step = bytes | asyncio.Event | float
Plan = list[Step]
Answerer = Callable[[dict[str, Any]], Plan]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def text(piece: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": piece, **more}])


def usage(num_prompt: int, num_output: int) -> bytes:
    told = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return event(choices=[], usage=told)


def whole(status: str, content: Any, content_type: str = "application/json") -> Plan:
    """An answer that is no stream."""
    body = orjson.dumps(content)
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nConnection: close\r\n"
    return [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body]


def good(body: dict[str, Any]) -> Plan:
    """One event for each token, and the usage."""
    num_output = body["max_tokens"]
    return [
        STREAM,
        *(text(" a") for _ in range(num_output - 1)),
        text(" z", finish_reason="length") + usage(len(body["prompt"]), num_output) + DONE,
    ]


@dataclass
class OpenAIService:
    """Remembers the bodies of completions; answers each by the next plan, if there is one."""

    answerer: Answerer = good
    models: Plan = field(default_factory=lambda: whole("200 OK", {"data": [{"id": "tiny"}]}))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    url: str = ""
    has_all: asyncio.Event = field(default_factory=asyncio.Event)
    num_awaited: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["OpenAIService"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    @property
    def replayed(self) -> list[dict[str, Any]]:
        """Without the request that a bench sends ahead."""
        return self.bodies[1:]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            for step in await self._plan(head, reader):
                await self._do(step, writer)
        finally:
            writer.close()

    async def _plan(self, head: bytes, reader: asyncio.StreamReader) -> Plan:
        if head.startswith(b"GET"):
            return self.models
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        if len(self.bodies) == self.num_awaited:
            self.has_all.set()
        return self.answerer(body)

    async def _do(self, step: Step, writer: asyncio.StreamWriter) -> None:
        if isinstance(step, asyncio.Event):
            await step.wait()
            return
        if isinstance(step, float):
            await asyncio.sleep(step)
            return
        writer.write(step)
        await writer.drain()


def planned(*plans: Plan) -> Answerer:
    """A good answer to what is sent ahead, then these plans in order."""
    left = [*plans]
    seen: list[int] = []

    def answer(body: dict[str, Any]) -> Plan:
        seen.append(1)
        return good(body) if len(seen) == 1 or not left else left.pop(0)

    return answer


@contextmanager
def served(answerer: Answerer = good) -> Iterator[OpenAIService]:
    """A service in a thread of its own: the command has an event loop of its own too."""
    service = OpenAIService(answerer)
    is_up = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with service.running():
            is_up.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(10)
        yield service
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
