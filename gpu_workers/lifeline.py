"""A worker must not outlive its daemon, however the daemon dies.

Two belts: the kernel kills us when the thread that spawned us ends (PR_SET_PDEATHSIG), and the
inherited channel reads end-of-file when the last holder of its other end is gone.
"""

import ctypes
import os
import select
import signal
import socket
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int) -> None:
    """Call first thing in a new process: the parent may have died before the call."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_parent:
        os._exit(1)


def watch(channel: socket.socket) -> None:
    """Leave the process when the channel's other end is closed. Reads nothing from it."""
    threading.Thread(target=_wait_for_end, args=(channel,), daemon=True, name="lifeline").start()


def _wait_for_end(channel: socket.socket) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLHUP)
    while not any(events & select.POLLHUP for _, events in poll.poll()):
        pass
    os._exit(1)
