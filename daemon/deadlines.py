"""Moments by which something must have happened, the soonest first.

Pure: the clock is passed in, and whoever waits asks when to look next. A deadline that is dropped
lets go of its item at once: most requests end long before their time is up.
"""

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

Item = TypeVar("Item", bound=Hashable)

_SPARE_ENTRIES = 64


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request may take, in seconds.

    Args:
        queue_s: until its prefill has its turn. Half of what OpenAI's client gives a whole answer:
            whoever has waited so long still has as long for the answer.
        request_s: its whole life.
        outage_s: while no instance is up that could go on with it.
    """

    queue_s: float = 300.0
    request_s: float = 3600.0
    outage_s: float = 60.0


class Deadlines(Generic[Item]):
    """One deadline for each item."""

    def __init__(self) -> None:
        self._heap: list[_Entry[Item]] = []
        self._entries: dict[Item, _Entry[Item]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_s(self) -> float | None:
        """When the soonest one is due; None while there is none."""
        self._skip_dropped()
        return self._heap[0].due_s if self._heap else None

    def set(self, item: Item, due_s: float) -> None:
        """In place of an earlier one."""
        self.drop(item)
        entry = self._entries[item] = _Entry(due_s, next(self._order), item)
        heapq.heappush(self._heap, entry)

    def drop(self, item: Item) -> None:
        """It has happened. Idempotent."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return
        entry.item = None
        if len(self._heap) > 2 * len(self._entries) + _SPARE_ENTRIES:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[Item]:
        """Remove and return all that are due, the soonest first."""
        due: list[Item] = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            item = heapq.heappop(self._heap).item
            assert item is not None, "dropped entries were skipped"
            del self._entries[item]
            due.append(item)
        return due

    def _skip_dropped(self) -> None:
        while self._heap and self._heap[0].item is None:
            heapq.heappop(self._heap)


class _Entry(Generic[Item]):
    """Entries of equal time keep the order in which they were set."""

    def __init__(self, due_s: float, order: int, item: Item) -> None:
        self.due_s = due_s
        self.item: Item | None = item
        self._order = order

    def __lt__(self, other: "_Entry[Item]") -> bool:
        return (self.due_s, self._order) < (other.due_s, other._order)
