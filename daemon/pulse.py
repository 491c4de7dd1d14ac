"""Decide whether the daemon gets on: what the service manager's watchdog is told by.

Pure. A loop that merely turns is not enough, since a part of the daemon may stand still in it:
every part counts its own rounds, and none may stop counting. A hung worker is the supervisor's
business and never ends the daemon.
"""

from collections.abc import Callable, Mapping

MAX_LATE_S = 5.0
"""Later than that, the loop is not serving anybody."""
MAX_STILL_S = 5.0
"""Parts make a round in a second or less."""


class Pulse:
    """Looks at counters of rounds, each named by the part that counts."""

    def __init__(
        self, parts: Mapping[str, Callable[[], int]], *, max_still_s: float = MAX_STILL_S
    ) -> None:
        self._parts = parts
        self._max_still_s = max_still_s
        self._seen: dict[str, tuple[int, float]] = {}  # rounds, and since when as many

    def trouble(self, now_s: float, late_s: float) -> str | None:
        """What stands still, if anything does.

        Args:
            late_s: how much later than it was due this look comes.
        """
        still = [name for name in self._parts if self._still_s(name, now_s) > self._max_still_s]
        if late_s > MAX_LATE_S:
            return f"the event loop is {late_s:.1f} s late"
        return f"no progress of {', '.join(still)}" if still else None

    def _still_s(self, name: str, now_s: float) -> float:
        rounds = self._parts[name]()
        before, since_s = self._seen.get(name, (None, now_s))
        if rounds != before:
            since_s = now_s
        self._seen[name] = (rounds, since_s)
        return now_s - since_s
