"""Keeps the service manager told: a status line, more time while it is needed, signs of life.

Status goes out when it changes, at most once a second. While the daemon starts or ends, the
manager's patience is extended again and again for as long as the loop turns; in between its
watchdog is told of progress alone. What the status says and what progress is, others know.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from daemon.admin_views import NodeState
from daemon.pulse import Pulse
from daemon.sd_notify import Notifier

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
BEAT_S = 5.0
BEATS_PER_EXTENSION = 3


class Stage(Enum):
    """Where the service is for its manager; it only ever goes on."""

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()


class ServiceReport:
    """What the service manager hears, from the first worker's start to the end.

    Args:
        beat_s: at most so long between two signs of life; the watchdog may want more.
    """

    def __init__(
        self,
        notifier: Notifier,
        describe: Callable[[], str],
        pulse: Pulse,
        *,
        beat_s: float = BEAT_S,
        status_every_s: float = STATUS_EVERY_S,
    ) -> None:
        self._notifier = notifier
        self._describe = describe
        self._pulse = pulse
        self._beat_s = beat_s
        self._status_every_s = status_every_s
        self._changed = asyncio.Event()
        self.stage = Stage.STARTING

    def changed(self) -> None:
        """What `describe` says may be different now."""
        self._changed.set()

    def ready(self) -> None:
        """The daemon can serve. Once; afterwards it is a status like any other."""
        if self.stage is Stage.STARTING:
            self.stage = Stage.SERVING
            self._notifier.ready(self._describe())

    def stopping(self) -> None:
        """The daemon is on its way out and does not come back."""
        self.stage = Stage.STOPPING
        self._notifier.stopping(self._describe())
        self._extend()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Around reading the configuration again. Never says ready of a service that is not."""
        if self.stage is not Stage.SERVING:
            yield
            return
        self._notifier.reloading()
        try:
            yield
        finally:
            self._notifier.ready(self._describe())

    async def run(self) -> None:
        """Until cancelled, if there is a manager at all."""
        if self._notifier.is_active:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._tell())
                both.create_task(self._beat())

    async def _tell(self) -> None:
        told = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            if (text := self._describe()) == told:
                continue
            self._notifier.status(text)
            told = text
            await asyncio.sleep(self._status_every_s)

    async def _beat(self) -> None:
        """In time for the watchdog, and for the extensions."""
        loop = asyncio.get_running_loop()
        ping_s = self._notifier.ping_interval_s
        interval_s = self._beat_s if ping_s is None else min(ping_s, self._beat_s)
        while True:
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            self._sign_of_life(loop.time(), due_s)

    def _sign_of_life(self, now_s: float, due_s: float) -> None:
        trouble = self._pulse.trouble(now_s, late_s=now_s - due_s)
        if self.stage is not Stage.SERVING:
            self._extend()
        elif trouble is None:
            self._notifier.watchdog()
        elif self._notifier.ping_interval_s is not None:
            logger.error("the watchdog is not told that all is well: %s", trouble)

    def _extend(self) -> None:
        self._notifier.extend(BEATS_PER_EXTENSION * self._beat_s)


def status_line(state: NodeState, num_open: int, progress: str) -> str:
    """One line for `systemctl status`; which instances there are is told while some are missing."""
    load = f"{num_open} request{'' if num_open == 1 else 's'} under way"
    match state:
        case NodeState.READY | NodeState.DRAINING:
            return f"{state}: {load}"
        case NodeState.STARTING:
            return f"{state}: {progress}"
        case NodeState.DEGRADED:
            return f"{state}: {load}; {progress}"
