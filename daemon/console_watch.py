"""Notices when the daemon goes away and when it is back, while nobody asks it anything.

A thread with a connection of its own, woken by ZeroMQ's own events; it asks nothing but the
status once the daemon is back.
"""

import os
import threading
from collections.abc import Callable
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from daemon.admin_commands import GetStatus
from daemon.admin_protocol import StatusIs
from daemon.console_client import Whereabouts, connected, dealer
from daemon.errors import ExitError

OnMoved = Callable[[bool, StatusIs | None], None]
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class DaemonWatch:
    """Tells of changes, from a thread, inside its `with` block."""

    def __init__(self, where: Whereabouts, on_moved: OnMoved) -> None:
        self._where = where
        self._on_moved = on_moved
        self._is_there = True
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._stop_read, self._stop_write = os.pipe()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stop_write)
        self._thread.join()
        os.close(self._stop_read)

    def _watch(self) -> None:
        with zmq.Context() as context, dealer(context, self._where) as socket:
            monitor = socket.get_monitor_socket(_EVENTS)
            poller = zmq.Poller()
            poller.register(monitor, zmq.POLLIN)
            poller.register(self._stop_read, zmq.POLLIN)
            socket.connect(self._where.address)
            while self._stop_read not in (ready := dict(poller.poll())):
                if monitor in ready:
                    event = recv_monitor_message(monitor)["event"]
                    self._on_event(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.disable_monitor()
            monitor.close(linger=0)

    def _on_event(self, is_there: bool) -> None:
        if is_there != self._is_there:
            self._is_there = is_there
            self._on_moved(is_there, self._status() if is_there else None)

    def _status(self) -> StatusIs | None:
        try:
            with connected(self._where) as client:
                answer = client.ask(GetStatus())
        except ExitError:  # gone again: the next event says so
            return None
        return answer if isinstance(answer, StatusIs) else None
