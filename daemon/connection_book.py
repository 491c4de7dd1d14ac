"""Who is connected over HTTP, how many are too many, and who may be asked to leave for another.

Pure counting: no sockets, no clock. A connection that waits for its client's next request gives
its place up, the longest waiting first, before a new one is turned away.
"""

from collections import Counter
from typing import Protocol

MAX_TURNED_AWAY = 64
"""Connections over the limit that are still being told so; more are closed without a word."""


class Connection(Protocol):
    """What the book may ask of those that it counts."""

    def leave(self) -> None:
        """Close: another needs the place."""
        ...


class ConnectionBook:
    """The connections that are open now. Everything may be said twice."""

    def __init__(self, max_total: int, max_per_peer: int) -> None:
        self._max_total = max_total
        self._max_per_peer = max_per_peer
        self._peers: dict[Connection, str] = {}
        self._by_peer: Counter[str] = Counter()
        self._resting: dict[Connection, None] = {}  # in the order in which they came to rest
        self._turned_away: set[Connection] = set()

    @property
    def num_open(self) -> int:
        return len(self._peers)

    def admit(self, connection: Connection, peer: str) -> bool:
        """Whether there is a place for it; if so, it has it until it is released."""
        if self._by_peer[peer] >= self._max_per_peer:
            return False
        if self.num_open >= self._max_total and not self._make_room():
            return False
        self._peers[connection] = peer
        self._by_peer[peer] += 1
        return True

    def turn_away(self, connection: Connection) -> bool:
        """Whether there is time to tell it why."""
        if len(self._turned_away) >= MAX_TURNED_AWAY:
            return False
        self._turned_away.add(connection)
        return True

    def release(self, connection: Connection) -> None:
        """It is closed."""
        self._resting.pop(connection, None)
        self._turned_away.discard(connection)
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    def rest(self, connection: Connection) -> None:
        """It has answered all and waits for what its client may ask next."""
        if connection in self._peers:
            self._resting[connection] = None

    def wake(self, connection: Connection) -> None:
        """Its client asks something."""
        self._resting.pop(connection, None)

    def _make_room(self) -> bool:
        for connection in self._resting:
            self.release(connection)
            connection.leave()
            return True
        return False
