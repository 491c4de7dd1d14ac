"""Bodies on their way in: bounded each and all together, on time, and read beside the event loop.

A small body is read at once. A large one is read by the one thread there is for large things, one
after the other, so that whatever it costs is paid by those who send large ones.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager

import msgspec
from starlette.requests import Request

from daemon.errors import BodyTooLarge, InvalidRequest, QueueFull, RequestTooSlow
from daemon.frontend.json_shape import check_shape
from daemon.frontend.schema import BodyType, read_body
from daemon.frontend.unknown_fields import UnknownFields

SMALL_BYTES = 64 * 1024  # a millisecond or two, whatever is in it


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may cost before it is refused or given up.

    A body has `body_s` seconds, and more by its size at the slowest rate that is borne: by the size
    that its head announces, or by what has come of one in chunks.
    `max_bodies_bytes` is for all bodies that are on their way or being read.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_bodies_bytes: int = 256 * 1024 * 1024
    body_s: float = 30.0
    min_body_bytes_per_s: int = 64 * 1024
    stall_s: float = 60.0


class Bodies:
    """Takes them in; `aside` is where large ones are read, `unknown` counts what is ignored."""

    def __init__(
        self, limits: Limits, aside: Executor, unknown: UnknownFields | None = None
    ) -> None:
        self._limits = limits
        self._num_held_bytes = 0
        self._aside = aside
        self._unknown = unknown

    @asynccontextmanager
    async def body_of(self, request: Request, kind: type[BodyType]) -> AsyncIterator[BodyType]:
        """The request's body as a typed value; it counts against the bound until it is let go.

        Raises:
            ServeError: it is too large, too slow, or not what it should be.
        """
        raw = bytearray()
        try:
            await self._receive(request, raw)
            yield await self._read(bytes(raw), kind)
        finally:
            self._num_held_bytes -= len(raw)

    async def _receive(self, request: Request, raw: bytearray) -> None:
        """Refused by its announced length, or as soon as it has grown too long."""
        _check_headers(request)
        num_announced = self._check_size(_announced_bytes(request))
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(self._due_s(begun_s, num_announced)) as patience:
                async for chunk in request.stream():
                    raw += chunk
                    self._num_held_bytes += len(chunk)
                    if self._check_size(len(raw)) > num_announced:
                        patience.reschedule(self._due_s(begun_s, len(raw)))
        except TimeoutError as error:
            raise RequestTooSlow("The body did not arrive in time.") from error

    async def _read(self, raw: bytes, kind: type[BodyType]) -> BodyType:
        if len(raw) <= SMALL_BYTES:
            return self._parsed(raw, kind)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, self._parsed, raw, kind)

    def _parsed(self, raw: bytes, kind: type[BodyType]) -> BodyType:
        check_shape(raw)
        return read_body(raw, kind, self._unknown)

    def _due_s(self, begun_s: float, num_bytes: int) -> float:
        """When a body of so many bytes must have come."""
        return begun_s + self._limits.body_s + num_bytes / self._limits.min_body_bytes_per_s

    def _check_size(self, num_bytes: int) -> int:
        if num_bytes > self._limits.max_body_bytes:
            most = self._limits.max_body_bytes
            raise BodyTooLarge(f"The body must have at most {most} bytes.")
        if self._num_held_bytes > self._limits.max_bodies_bytes:
            raise QueueFull("Too much is being sent at this moment.")
        return num_bytes


def _check_headers(request: Request) -> None:
    """Only plain JSON is read; a form from some web page's script is not."""
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("The Content-Type must be application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("A Content-Encoding is not supported.")


def _announced_bytes(request: Request) -> int:
    """The length that the head tells; a body in chunks tells none."""
    announced = request.headers.get("content-length", "0")
    return int(announced) if announced.isdecimal() else 0
