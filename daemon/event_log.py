"""What happened on this node of late: a bounded ring of numbered events, for who follows them.

Numbers have no gaps, so a follower that was too slow sees how many it missed. Nobody is waited for:
followers come and ask, and a note costs the same whether there are any or not.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from daemon.admin_views import EventKind, EventLine

KEPT = 1024
_MAX_TEXT = 300


class Notebook(Protocol):
    """Where parts of the daemon put down what happened."""

    def note(self, kind: EventKind, subject: str, text: str = "") -> None: ...


class Page(msgspec.Struct, frozen=True):
    """Events in order. `next_after` is to be asked for next; `num_lost` had been forgotten."""

    events: Sequence[EventLine]
    next_after: int
    num_lost: int


class EventLog:
    """The last `kept` events."""

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.time) -> None:
        self._events: deque[EventLine] = deque(maxlen=kept)
        self._clock = clock
        self._last = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def note(self, kind: EventKind, subject: str, text: str = "") -> None:
        self._last += 1
        shown = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        self._events.append(
            EventLine(number=self._last, at_s=self._clock(), kind=kind, subject=subject, text=shown)
        )
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def after(self, number: int | None, limit: int) -> Page:
        """The oldest events after that number, `limit` at most; None: the newest ones. A number
        that was never given out is an earlier daemon's: all are new then."""
        if number is None:
            number = max(0, self._last - min(limit, len(self._events)))
        elif number > self._last:
            number = 0
        first_kept = self._last - len(self._events) + 1
        first = max(number + 1, first_kept)
        start = first - first_kept
        events = [self._events[i] for i in range(start, min(start + limit, len(self._events)))]
        return Page(events, first - 1 + len(events), num_lost=first - number - 1)

    async def newer_than(self, number: int | None) -> None:
        """Wait until there is an event after that number, or any new one."""
        if number is not None and number != self._last:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
