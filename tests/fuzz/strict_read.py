"""Reading as it must be: a value or the declared error in one sentence, soon, within bounds."""

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

MAX_CPU_S = 1.0
MAX_MESSAGE_CHARS = 12_000  # where the longest text among the inputs is repeated whole


def strict_read(read: Callable[[], Any], *declared: type[Exception]) -> Any:
    """What `read` returns, or None where it raised one of the declared errors.

    Any other error passes through and fails the test. Time is that of our own thread: what other
    programs take away does not count.
    """
    started_s = time.thread_time()
    value, message = _read(read, declared)
    assert time.thread_time() - started_s < MAX_CPU_S, "it took too long"
    assert message is None or 0 < len(message) <= MAX_MESSAGE_CHARS, message[:200]
    return value


def peak_bytes(read: Callable[[], Any], *declared: type[Exception]) -> int:
    """The most memory that Python's allocator gave out meanwhile."""
    tracemalloc.start()
    try:
        strict_read(read, *declared)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _read(read: Callable[[], Any], declared: tuple[type[Exception], ...]) -> tuple[Any, str | None]:
    """A value, or what was said instead."""
    try:
        return read(), None
    except declared as error:
        return None, str(error)
