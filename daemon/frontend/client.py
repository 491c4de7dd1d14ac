"""The far end of one response: send to it, and notice when it has left or stopped reading.

One listener per response waits for the disconnect; sending itself costs no task and no timer.
Whoever is inside the `async with` block is interrupted when the client is gone, and leaves it by
`ClientGone`.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive, Send

Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


class ClientStalled(ClientGone):
    """The client keeps its connection but does not read."""


class Client:
    """One client during one response; its head goes through `send`, its body through `send_on`.
    `stall_s` is how long a single send may be blocked."""

    def __init__(self, receive: Receive, send: Send, send_on: Send, *, stall_s: float) -> None:
        self._receive = receive
        self._send = send
        self._send_on = send_on
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._blocked_since_s: float | None = None
        self._reason: type[ClientGone] | None = None
        self._has_ended = False
        self.has_begun = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels_before = task.cancelling()
        self._listener = self._loop.create_task(self._listen())
        self._timer = self._loop.call_later(self._stall_s, self._look_for_stall)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._listener.cancel()
        del self._listener  # its traceback leads back here: a circle that would stay in memory
        if self._reason is None:
            return
        if self._task.uncancel() <= self._num_cancels_before and kind is asyncio.CancelledError:
            raise self._reason from error

    async def begin(self, headers: Headers) -> None:
        """Start a successful response; from here on an error cannot change its status."""
        self.has_begun = True
        self._blocked_since_s = self._loop.time()  # the answer before may not have been read yet
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._blocked_since_s = None

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Hand out a part of the body; waits while the client reads too slowly."""
        self._blocked_since_s = self._loop.time()
        await self._send_on({"type": "http.response.body", "body": data, "more_body": more})
        self._blocked_since_s = None
        self._has_ended = not more

    async def _listen(self) -> None:
        """The end of the response is told as a disconnect, too."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._has_ended:
            self._interrupt(ClientGone)

    def _look_for_stall(self) -> None:
        """Runs once per `stall_s`, or when a send that is blocked now would be too long."""
        since_s = self._blocked_since_s
        now_s = self._loop.time()
        due_s = (now_s if since_s is None else since_s) + self._stall_s
        if since_s is not None and due_s <= now_s:
            self._interrupt(ClientStalled)
        else:
            self._timer = self._loop.call_at(due_s, self._look_for_stall)

    def _interrupt(self, reason: type[ClientGone]) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
