"""Hear from a device, as from a socket, how far it has come.

A loop that waits for messages cannot wait for its device as well. One thread does: it waits for
one mark in the device's work after the other, and says so on a socket that the loop can poll. It
touches nothing else.
"""

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Wait = Callable[[], None]
"""Returns once the device has come to a mark."""


class DeviceWatch:
    """One thread, until closed.

    Args:
        mark: makes a mark behind all that the device has been asked for.
    """

    def __init__(self, mark: Callable[[], Wait]) -> None:
        self._mark = mark
        self._marks: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self.waitable, self._teller = socket.socketpair()
        self.waitable.setblocking(False)
        threading.Thread(target=self._watch, name="device-watch", daemon=True).start()

    def mark(self) -> None:
        """The device is to be watched coming to where its work ends now."""
        self._marks.put(self._mark())

    def passed(self) -> int:
        """How many marks it has passed since this was asked last; never waits.

        Raises:
            Exception: the device failed; whatever it says, torch's or our own.
        """
        try:
            told = self.waitable.recv(4096)
        except BlockingIOError:
            return 0
        if self._failure is not None:
            raise self._failure
        return len(told)

    def close(self) -> None:
        """Nobody listens any more. The thread is not waited for: its device may never come to the
        next mark, and it ends with the process at the latest."""
        self._marks.put(None)
        self.waitable.close()

    def _watch(self) -> None:
        with self._teller, suppress(BrokenPipeError, ConnectionResetError):
            while self._failure is None and (wait := self._marks.get()) is not None:
                try:
                    wait()
                except Exception as error:  # raised where it is heard of: nobody waits for us
                    self._failure = error
                self._teller.send(b".")
