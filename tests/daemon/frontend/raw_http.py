"""HTTP by hand: bytes on a connection, and answers read off it as they are framed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

HEALTH = b"GET /health/live HTTP/1.1\r\nhost: test\r\n\r\n"


class Answer(msgspec.Struct):
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        """Of an error in the API's shape, which it has to be."""
        error = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        code: str | None = error["code"]
        return code


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """As far as the other end takes it."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            return

    async def answer(self, *, has_body: bool = True) -> Answer:
        """The next response; EOFError where there is none."""
        head = (await self._read(self.reader.readuntil(b"\r\n\r\n"))).decode()
        status, *lines = head.rstrip().split("\r\n")
        assert status.startswith("HTTP/1.1 ")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        if not has_body or status.startswith("HTTP/1.1 204"):
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = await self._chunks()
        else:
            body = await self._read(self.reader.readexactly(int(headers["content-length"])))
        return Answer(int(status.split()[1]), headers, body)

    async def rest(self) -> bytes:
        """All until the other end closes."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def _chunks(self) -> bytes:
        body = b""
        while size := int((await self._read(self.reader.readline())).strip(), 16):
            body += (await self._read(self.reader.readexactly(size + 2)))[:-2]
        assert await self._read(self.reader.readline()) == b"\r\n"
        return body

    async def _read(self, reading: Any) -> bytes:
        try:
            data: bytes = await reading
        except ConnectionError as error:
            raise EOFError from error
        return data


@asynccontextmanager
async def wire_to(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def answer_to(port: int, data: bytes) -> Answer:
    """What is answered first to these bytes on a connection of their own."""
    async with wire_to(port) as wire:
        await wire.send(data)
        return await wire.answer()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a body."""
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
