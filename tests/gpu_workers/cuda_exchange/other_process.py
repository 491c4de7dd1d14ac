"""A process beside the test's, with a pool on a played GPU or a pull from one, that may die.

It does so at a moment that it counts to itself: at its n-th copy.
"""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Self

import psutil

from gpu_workers.cuda_slots import TOTAL_BYTES
from ipc.kv_layout import RankLayout
from ipc.vocabulary import WorkerName
from tests.gpu_workers.cuda_exchange.rigs import EPOCH, Process


def owner(pipe: Connection, layout: RankLayout, dies_at: int | None = None) -> None:
    """Has a pool until the test is over, or until it is read for the n-th time."""
    process = Process(layout)
    process.exchange.pool.fill_(1.0)
    process.library.dies_at_copy = dies_at
    send_handle(pipe, process.exchange.descriptor, pipe.recv())
    pipe.recv()


def cramped(pipe: Connection, layout: RankLayout) -> None:
    """An owner whose process has no room for a reader's slots, until it is told."""
    process = Process(layout)
    process.exchange.pool.fill_(1.0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = psutil.Process().memory_info().vms + TOTAL_BYTES // 2
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    send_handle(pipe, process.exchange.descriptor, pipe.recv())
    pipe.recv()
    resource.setrlimit(resource.RLIMIT_AS, before)
    pipe.send(None)
    pipe.recv()


def dies_reading(pipe: Connection, layout: RankLayout) -> None:
    """Pulls all of a pool, and ends when it has emptied two slots and others are full."""
    process = Process(layout, gpu=1)
    descriptor = recv_handle(pipe)
    process.exchange.map_peer(WorkerName("there"), EPOCH, layout, descriptor)
    process.pull([0], [0])
    process.until_finished()
    process.library.dies_at_copy = 3
    process.pull(range(layout.num_blocks), range(layout.num_blocks))
    pipe.recv()


class OtherProcess:
    """Runs one of the above."""

    def __init__(self, body: Callable[..., None], layout: RankLayout, **how: Any) -> None:
        context = multiprocessing.get_context("forkserver")  # which loads torch once
        context.set_forkserver_preload(["torch"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, layout), kwargs=how)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

    def descriptor(self) -> int:
        """Of an owner's pool."""
        self._pipe.send(os.getpid())
        return recv_handle(self._pipe)

    def give(self, descriptor: int) -> None:
        """To a reader."""
        assert self._process.pid is not None
        send_handle(self._pipe, descriptor, self._process.pid)

    def stop(self) -> None:
        """It exists, and does nothing any more when this returns."""
        self._signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            pass

    def go_on(self) -> None:
        """After `stop`."""
        self._signal(signal.SIGCONT)

    def give_room(self) -> None:
        """To one that is cramped."""
        self._pipe.send(None)
        self._pipe.recv()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def ended(self) -> int | None:
        """How it ended, when it has."""
        self._process.join()
        return self._process.exitcode

    def _signal(self, number: int) -> None:
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)
