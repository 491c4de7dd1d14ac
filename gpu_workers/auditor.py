"""Looks over the block books again and again: as often as is cheap, and whenever it is asked to.

A fault is logged when it appears, not as often as it is seen, and so is its end. It is counted
once as well, in the number that the daemon shows.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

AUDIT_INTERVAL_S = 0.25
MAX_SHARE = 0.01  # of the step loop's time; a pool of 100,000 blocks takes 10 ms


class Auditor:
    """Keeps what the last audit found.

    Args:
        audit: what does not agree now, in words.
    """

    def __init__(self, audit: Callable[[], list[str]]) -> None:
        self._audit = audit
        self._due_s = 0.0
        self._faults: frozenset[str] = frozenset()
        self.num_faults = 0

    @property
    def num_standing(self) -> int:
        """Faults that the last audit found; `num_faults` are those of all."""
        return len(self._faults)

    def demand(self) -> None:
        """The next `look` is not to wait."""
        self._due_s = 0.0

    def look(self, now_s: float) -> None:
        """Audit, if it is time."""
        if now_s < self._due_s:
            return
        began_s = time.thread_time()
        self._take(frozenset(self._audit()))
        cost_s = time.thread_time() - began_s
        self._due_s = now_s + max(AUDIT_INTERVAL_S, cost_s / MAX_SHARE)

    def _take(self, faults: frozenset[str]) -> None:
        for fault in sorted(faults - self._faults):
            logger.error("block audit: %s", fault)
        if self._faults and not faults:
            logger.info("block audit: the books agree again")
        self.num_faults += len(faults - self._faults)
        self._faults = faults
