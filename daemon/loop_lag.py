"""How late the event loop is: the time from when something was due to when it ran.

Everything in the daemon waits for its turn on one loop, so this is the delay that any token, any
health check and any new request gets on top of its own work. It knows nothing of what runs there.
"""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.1


class LoopLag:
    """Tells `record` a lag in seconds, ten times a second."""

    def __init__(self, record: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
        self._record = record
        self._interval_s = interval_s

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._record(max(0.0, loop.time() - due_s))
