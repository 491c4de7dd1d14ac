"""What is said when no connection can be taken for want of descriptors or memory.

asyncio tells its exception handler of each try, as many as it makes in one go, and tries again a
second later: a log that fills a disk does not help whoever has run out of files.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

APART_S = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class AcceptLog:
    """An event loop's exception handler: that much in one line a second, all else as ever."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_accept = "socket" in context and "transport" not in context
        if not (is_accept and isinstance(error, OSError) and error.errno in _EXHAUSTED):
            loop.default_exception_handler(context)
        elif (now_s := self._clock()) >= self._due_s:
            self._due_s = now_s + APART_S
            logger.error("no connection can be taken, those that come have to wait: %s", error)
