"""Turns what is seen of instances into events: who started, became ready, died, went.

Looks whenever an instance moves and compares with the look before, so that nobody who moves them
needs to know of events. What comes in floods (refusals, faults of audits) is summed up now and
then. It decides nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec

from daemon.admin_views import EventKind
from daemon.event_log import Notebook
from daemon.instances import InstanceTable
from daemon.ward import Ward

SUMMARY_S = 5.0


class Glance(msgspec.Struct, frozen=True):
    """An instance as it was at one look."""

    epoch: int | None
    is_ready: bool
    deaths: int
    quarantined: str | None
    last_exit: str | None
    is_wanted_gone: bool  # on purpose: it is replaced, or leaves for good


class EventFeed:
    """See the module's docstring.

    Args:
        wards: all instances of this node, by name; looked at anew each time.
        refused: requests that were refused since the start, by reason; likewise.
    """

    def __init__(
        self,
        log: Notebook,
        wards: Mapping[str, Ward],
        table: InstanceTable,
        refused: Mapping[str, int],
    ) -> None:
        self._log = log
        self._wards = wards
        self._table = table
        self._refused = refused
        self._seen = {name: glance(ward) for name, ward in wards.items()}
        self._told_refused: Counter[str] = Counter()
        self._faults: dict[tuple[str, int], int] = {}

    def look(self) -> None:
        """An instance has moved."""
        seen = {name: glance(ward) for name, ward in self._wards.items()}
        for name in self._seen.keys() - seen.keys():
            self._log.note(EventKind.REMOVED, name)
        for name, now in seen.items():
            before = self._seen.get(name)
            if before is None:
                self._log.note(EventKind.ADDED, name)
            for kind, text in changes(before or NOTHING, now):
                self._log.note(kind, name, text)
        self._seen = seen

    async def run(self) -> None:
        """Sums up, for ever."""
        while True:
            await asyncio.sleep(SUMMARY_S)
            self.sum_up()

    def sum_up(self) -> None:
        """What came in floods since the last time."""
        refused = Counter(self._refused) - self._told_refused
        self._told_refused += refused
        if refused:
            text = ", ".join(f"{count} {code}" for code, count in refused.most_common())
            self._log.note(EventKind.REFUSED, f"{refused.total()} requests", text)
        before, self._faults = self._faults, {}
        for instance in self._table:
            life, faults = (instance.name, instance.epoch), instance.stats.audit_failures
            self._faults[life] = faults
            if faults > before.get(life, 0):
                text = f"{faults - before.get(life, 0)} faults in the block books, see the log"
                self._log.note(EventKind.AUDIT_FAILED, instance.name, text)


NOTHING = Glance(None, False, 0, None, None, False)


def glance(ward: Ward) -> Glance:
    return Glance(
        epoch=ward.life.epoch if ward.life is not None else None,
        is_ready=ward.is_ready,
        deaths=ward.restarts,
        quarantined=ward.quarantined,
        last_exit=ward.last_exit,
        is_wanted_gone=ward.is_replaced or ward.is_leaving,
    )


def changes(before: Glance, now: Glance) -> list[tuple[EventKind, str]]:
    """What must have happened in between, in order."""
    found: list[tuple[EventKind, str]] = []
    is_other_life = now.epoch != before.epoch
    if is_other_life and before.epoch is not None and (before.is_wanted_gone or now.is_wanted_gone):
        found.append((EventKind.STOPPED, "on purpose"))
    if now.deaths > before.deaths:
        reason = now.last_exit or ""
        # The heartbeat dooms what got nowhere with a reason that begins so.
        is_wedged = reason.startswith("wedged: ")
        found.append((EventKind.WEDGED if is_wedged else EventKind.DIED, reason))
    if now.quarantined is not None and before.quarantined is None:
        found.append((EventKind.QUARANTINED, now.quarantined))
    if is_other_life and now.epoch is not None:
        found.append((EventKind.STARTED, "again" if now.deaths else ""))
    if now.is_ready and (is_other_life or not before.is_ready):
        found.append((EventKind.READY, "it can serve"))
    return found
