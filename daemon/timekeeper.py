"""Ends requests whose time is up: in the queue, in all, or while no instance is up for them.

It knows deadlines and when to look next; how a request is ended is the controller's. One task
sleeps until the soonest deadline and is woken when a sooner one is set: nothing is polled.
"""

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum, auto

from daemon.deadlines import Deadlines, TimeLimits
from daemon.errors import NotReady, QueueTimeout, RequestTimeout, ServeError
from daemon.request import Request, Trip
from daemon.trips import Trips


class _Limit(Enum):
    QUEUE = auto()
    REQUEST = auto()
    OUTAGE = auto()


class Timekeeper:
    """Told what happens to requests; `end` ends one by an error.

    `wait_s` predicts how long a request that comes now would wait: what is told to those who have
    waited in vain.
    """

    def __init__(
        self,
        limits: TimeLimits,
        trips: Trips,
        clock: Callable[[], float],
        *,
        end: Callable[[Request, ServeError], None],
        wait_s: Callable[[Request], float],
    ) -> None:
        self._limits = limits
        self._trips = trips
        self._clock = clock
        self._end = end
        self._wait_s = wait_s
        self._deadlines = Deadlines[tuple[_Limit, Request | Trip]]()
        self._sooner = asyncio.Event()
        self._awaited_s: float | None = None

    def arrived(self, request: Request) -> None:
        now_s = request.clock.arrived_s
        self._set(_Limit.QUEUE, request, now_s + self._limits.queue_s)
        self._set(_Limit.REQUEST, request, now_s + self._limits.request_s)

    def begun(self, request: Request) -> None:
        """Its turn has come: from here on only the limit of its whole life counts, for what may
        come later (a preemption, a death) is not the queue. Idempotent."""
        self._deadlines.drop((_Limit.QUEUE, request))

    def ended(self, request: Request) -> None:
        self._deadlines.drop((_Limit.QUEUE, request))
        self._deadlines.drop((_Limit.REQUEST, request))
        for trip in request.trips:
            self._deadlines.drop((_Limit.OUTAGE, trip))

    def stranded(self, trip: Trip) -> None:
        """No instance is up that could go on with it."""
        self._set(_Limit.OUTAGE, trip, self._clock() + self._limits.outage_s)

    def look(self) -> None:
        """End everything whose time is up."""
        for limit, item in self._deadlines.take_due(self._clock()):
            if isinstance(item, Trip):
                self._outage(item)
            elif limit is _Limit.QUEUE:
                self._waited(item)
            else:
                self._end(item, RequestTimeout(
                    f"the request was not finished within {self._limits.request_s:g} s"
                ))  # fmt: skip

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            self._sooner.clear()
            self._awaited_s = next_s = self._deadlines.next_s
            patience_s = None if next_s is None else max(0.0, next_s - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._sooner.wait()

    def _set(self, limit: _Limit, item: Request | Trip, due_s: float) -> None:
        self._deadlines.set((limit, item), due_s)
        if self._awaited_s is None or due_s < self._awaited_s:
            self._sooner.set()

    def _outage(self, trip: Trip) -> None:
        if self._trips.is_stranded(trip):
            self._end(trip.request, NotReady(
                f"no instance came up within {self._limits.outage_s:g} s to serve this request"
            ))  # fmt: skip

    def _waited(self, request: Request) -> None:
        self._end(request, QueueTimeout(
            f"the request has waited for {self._limits.queue_s:g} s without its turn coming",
            retry_after_s=self._wait_s(request),
        ))  # fmt: skip
