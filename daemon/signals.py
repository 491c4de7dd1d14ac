"""What signals mean to the daemon, from its first moment on.

SIGTERM and SIGINT stop it, SIGHUP has it read its configuration again; on a terminal SIGHUP says
that the terminal is gone, and stops it too. SIGUSR1 and SIGUSR2, which log rotation sends to
programs that have log files, end nothing.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_STOP = (signal.SIGTERM, signal.SIGINT)
_MEANINGLESS = (signal.SIGUSR1, signal.SIGUSR2)


def before_the_loop() -> None:
    """Until the loop has handlers of its own, both leave as Ctrl-C does: with all undone.

    SIGHUP is passed over, since what it asks to be read is just being read; not by ignoring it,
    which children would inherit.
    """
    for number in _STOP:
        signal.signal(number, _interrupt)
    for number in _MEANINGLESS:
        signal.signal(number, _pass_over)
    if not _is_on_terminal():
        signal.signal(signal.SIGHUP, _pass_over)


@contextmanager
def handled(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    """Within it, signals call these from the running loop."""
    loop = asyncio.get_running_loop()
    calls = dict.fromkeys(_STOP, stop)
    calls[signal.SIGHUP] = stop if _is_on_terminal() else reload
    for number, call in calls.items():
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in calls:
            loop.remove_signal_handler(number)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _pass_over(_: int, __: FrameType | None) -> None:
    return


def _is_on_terminal() -> bool:
    return os.isatty(0)
