"""Instances that get nothing new, and those who wait until nothing is left there."""

import asyncio

from daemon.instances import InstanceTable
from daemon.trips import Trips


class Drains:
    """To be looked at when something has left an instance."""

    def __init__(self, instances: InstanceTable, trips: Trips) -> None:
        self._instances = instances
        self._trips = trips
        self._clear: dict[str, asyncio.Event] = {}  # of those that are waited for

    async def drain(self, name: str) -> bool:
        """Give it nothing new; return when nothing is left there, or, with False, when it was
        taken back before. It stays drained, whatever comes of the waiting, until it is replaced
        or taken back."""
        instance = self._instances.set_draining(name, True)
        clear = self._clear.setdefault(name, asyncio.Event())
        self.look()
        await clear.wait()
        return instance.is_draining

    def take_back(self, name: str) -> None:
        """Whoever waits until nothing is left there waits no longer."""
        self._instances.set_draining(name, False)
        if (clear := self._clear.pop(name, None)) is not None:
            clear.set()

    def ended(self, name: str) -> None:
        """It is down."""
        self.look()
        self._clear.pop(name, None)

    def look(self) -> None:
        for name, clear in self._clear.items():
            instance = self._instances.get(name)
            busy = instance is not None and instance.has_work
            if not busy and not self._trips.is_reading_or_read(name):
                clear.set()
