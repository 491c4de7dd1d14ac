"""Faults inside the processes of a service, which has no hooks for them.

Python imports this first wherever its directory is on PYTHONPATH. CHAOS_DIR names a directory in
which a test leaves orders: an empty file `fault@instance` is taken once, by the process whom it
concerns, when it next comes to where the fault belongs.
"""

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

ORDERS = Path(os.environ.get("CHAOS_DIR", "/nonexistent"))


def take(fault: str, instance: object) -> bool:
    """Whether that is ordered; once."""
    try:
        (ORDERS / f"{fault}@{instance}").unlink()
    except FileNotFoundError:
        return False
    return True


def spoil(frames: list[bytes]) -> list[bytes]:
    """One bit in the middle of the payload: JSON still, as often as not."""
    payload = bytearray(frames[1])
    payload[len(payload) // 2] ^= 1
    return [frames[0], bytes(payload)]


class Encoding:
    """Stands between a socket and the codec; `spoils` makes the next frames wrong."""

    def __init__(self) -> None:
        from ipc import codec

        self._encode = codec.encode
        self.spoils = False
        codec.encode = self.encode

    def encode(self, *message: Any) -> list[bytes]:
        frames = self._encode(*message)
        if self.spoils:
            self.spoils = False
            return spoil(frames)
        return frames


def break_workers() -> None:
    from gpu_workers.executor import Executor
    from gpu_workers.worker import Worker
    from ipc.sockets import WorkerSocket

    encoding, own = Encoding(), []
    start, launch, send = Worker.__init__, Executor.launch, WorkerSocket.send
    fallocate = os.posix_fallocate

    def named(worker: Any, config: Any, channel: Any) -> None:
        own.append(config.name.instance)
        start(worker, config, channel)

    def hung(executor: Any, plan: Any) -> Any:
        if plan.rows and take("hung_step", own[0]):
            threading.Event().wait()
        return launch(executor, plan)

    def meddled(socket: Any, event: Any) -> None:
        if not own or type(event).__name__ in ("Hello", "Loading", "Ready"):
            send(socket, event)
        elif take("dropped_up", own[0]):
            socket._sent.take()
        else:
            encoding.spoils = take("corrupt_up", own[0])
            send(socket, event)
            if take("duplicated_up", own[0]):
                socket._sent._next -= 1
                send(socket, event)

    def full(descriptor: int, offset: int, size: int) -> None:
        if own and take("no_memory", own[0]):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        fallocate(descriptor, offset, size)

    Worker.__init__, Executor.launch, WorkerSocket.send = named, hung, meddled  # type: ignore[assignment, method-assign]
    os.posix_fallocate = full


def break_daemon() -> None:
    from ipc.sockets import DaemonSocket, identity

    encoding, send = Encoding(), DaemonSocket.send

    def meddled(socket: Any, worker: Any, epoch: int, command: Any) -> None:
        if type(command).__name__ in ("PeerUp", "Audit"):  # these come unasked, at any time
            send(socket, worker, epoch, command)
        elif take("dropped_down", worker.instance):
            socket._sent[identity(worker, epoch)].take()
        else:
            encoding.spoils = take("corrupt_down", worker.instance)
            send(socket, worker, epoch, command)

    DaemonSocket.send = meddled  # type: ignore[method-assign]


if ORDERS.is_dir():
    if {"gpu_workers", "worker"} <= set(sys.orig_argv):
        break_workers()
    elif {"daemon", "serve"} <= set(sys.orig_argv):
        break_daemon()
