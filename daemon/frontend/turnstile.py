"""Lets a few requests in per round of the event loop, so that a crowd stops no stream.

asyncio runs all that is ready before it looks at the sockets again. Thousands of requests that
arrive at once would all be read, checked and refused or started in one such round, and no token of
anybody would leave meanwhile. So those that want to compute something wait here for their round,
first come, first served; whoever asks for health does not.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

PER_ROUND = 32
"""Some ten milliseconds of work."""


class Turnstile:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp, per_round: int = PER_ROUND) -> None:
        self._app = app
        self._per_round = per_round
        self._num_through = 0  # in this round
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST":
            await self._through()
        await self._app(scope, receive, send)

    async def _through(self) -> None:
        if self._num_through < self._per_round and not self._waiting:
            self._let_through()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _let_through(self) -> None:
        if self._num_through == 0:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._num_through += 1

    def _next_round(self) -> None:
        """Called once per round while anybody comes or waits."""
        self._num_through = 0
        while self._waiting and self._num_through < self._per_round:
            turn = self._waiting.popleft()
            if not turn.done():  # else the connection's task was cancelled
                self._let_through()
                turn.set_result(None)
