"""Tell the service manager how the daemon is: READY, RELOADING, STATUS, STOPPING, WATCHDOG.

The notify protocol in pure Python: one datagram of `KEY=value` lines to the socket named in
NOTIFY_SOCKET. Without that variable everything here does nothing. Nothing here raises into the
daemon, and a status line that does not fit the queue is dropped. Only READY, RELOADING and
STOPPING, which the service manager waits for, are tried again, for a quarter of a second at most.
"""

import os
import select
import socket
import time
from collections.abc import MutableMapping
from types import TracebackType

# Whatever names the service manager's sockets and pids: not for the workers to inherit.
_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)
_MAX_STATUS = 200
_NUM_TRIES = 5
_RETRY_S = 0.05


class Notifier:
    """One connection to the service manager; a no-op where there is none."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self._socket = _connect(address) if address else None
        self._watchdog_s = watchdog_s if self._socket else None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> "Notifier":
        """Takes the service manager's variables out of the environment, so that no child has them.

        Call it before any worker is started.
        """
        taken = {name: environment.pop(name, "") for name in _VARIABLES}
        return cls(taken["NOTIFY_SOCKET"] or None, _watchdog_s(taken))

    @property
    def is_active(self) -> bool:
        """Whether a service manager listens."""
        return self._socket is not None

    @property
    def ping_interval_s(self) -> float | None:
        """How often `watchdog` is to be called: thrice within the limit; None if never."""
        return None if self._watchdog_s is None else self._watchdog_s / 3

    def ready(self, status: str = "") -> None:
        """The daemon can serve."""
        self._send_important("READY=1", *_status_lines(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(*_status_lines(text))

    def reloading(self) -> None:
        """The configuration is being read again; `ready` says when that is over."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send_important("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def stopping(self, status: str = "") -> None:
        """The daemon is on its way out. Not for a drain that can be undone."""
        self._send_important("STOPPING=1", *_status_lines(status))

    def watchdog(self) -> None:
        """The daemon makes progress."""
        self._send("WATCHDOG=1")

    def extend(self, seconds: float, status: str = "") -> None:
        """The next message comes within so many seconds: do not give up on this start or stop."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", *_status_lines(status))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> "Notifier":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, *lines: str) -> bool:
        """Whether the datagram left; False only when the queue is full."""
        if self._socket is None:
            return True
        try:
            self._socket.send("\n".join(lines).encode())
        except BlockingIOError:
            return False
        except OSError:
            self.close()  # the listener is gone for good: connected datagrams do not come back
        return True

    def _send_important(self, *lines: str) -> None:
        for _ in range(_NUM_TRIES):
            if self._send(*lines) or self._socket is None:
                return
            room = select.poll()
            room.register(self._socket, select.POLLOUT)
            room.poll(1000 * _RETRY_S)


def _connect(address: str) -> socket.socket | None:
    if address[0] not in "/@":
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    try:
        connection.connect(f"\0{address[1:]}" if address[0] == "@" else address)
    except OSError:
        connection.close()
        return None
    return connection


def _watchdog_s(variables: dict[str, str]) -> float | None:
    """The watchdog's limit, if it is meant for this process."""
    pid, limit = variables["WATCHDOG_PID"], variables["WATCHDOG_USEC"]
    if not limit.isdecimal() or int(limit) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(limit) / 1e6


def _status_lines(text: str) -> list[str]:
    """`STATUS=...` on one line: no text may smuggle in another assignment."""
    shown = "".join(c if c.isprintable() else " " for c in text)[:_MAX_STATUS]
    return [f"STATUS={shown}"] if shown else []
