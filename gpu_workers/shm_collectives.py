"""Sums and gathers of a stage's ranks through memory that all of them have mapped.

A stage sits on one node, so its ranks need no network for that: `native/collectives.c` says how
they take turns. A thread watches the connections by which the memory came: when one of them
ends, so has a rank, and whoever waits for it is told.
"""

import ctypes
import logging
import mmap
import os
import select
import socket
import threading
from typing import NamedTuple

import torch

from gpu_workers import shm_meeting
from gpu_workers.native_build import NativeLibrary, native_library
from gpu_workers.native_calls import RANK_BYTES, SUMMED_TYPES, Ended, StageArguments, StageCalls
from gpu_workers.shm_meeting import Shared, Store
from ipc import kv_shm

logger = logging.getLogger(__name__)

SLOT_BYTES = 1 << 18  # both slots of every rank of a small stage stay in a core's cache
SPIN_S = 100e-6  # what ranks of the same work seldom differ by; a sleep costs about half of it


class RankLost(RuntimeError):
    """Another rank has been silent for too long, or has left."""


class Waits(NamedTuple):
    """How long to wait for another rank: awake, and in all."""

    spin_s: float
    timeout_s: float


def sums_library() -> NativeLibrary | None:
    """The compiled library, unless DISTSERVE_KERNELS asks for torch."""
    return None if os.environ.get("DISTSERVE_KERNELS") == "torch" else native_library()


def join(
    store: Store, rank: int, size: int, library: NativeLibrary | None, timeout_s: float
) -> "SharedStage | None":
    """Our end of the stage's memory; None on all ranks where they cannot share any.

    Raises:
        OSError, RuntimeError: the others did not come, or the store failed.
    """
    ranks = shm_meeting.Ranks.ask(store, rank, size, can_share=library is not None)
    if library is None or ranks.unable:
        logger.info("sums go over gloo: tp rank %s has no compiled library", ranks.unable[0])
        return None
    shared = _share(store, rank, size, timeout_s)
    if shared is None:
        return None
    logger.info("sums go through shared memory")
    spin_s = SPIN_S if ranks.num_cores >= size else 0.0  # the core is another rank's as well
    waits = Waits(spin_s, timeout_s)
    return SharedStage(StageCalls(library), shared, rank, size, waits)


class SharedStage:
    """One rank's end of its stage.

    Args:
        calls: the compiled library's.
        shared: the memory, which becomes ours, and what tells that a rank has ended.
        rank: who we are.
        size: how many ranks there are.
        waits: how long another rank may let us wait.
    """

    def __init__(
        self, calls: StageCalls, shared: Shared, rank: int, size: int, waits: Waits
    ) -> None:
        self._rank, self._size, self._waits = rank, size, waits
        self._calls, self._connections = calls, shared.connections
        self._memory = _map(shared, size)
        self._first_byte: ctypes.c_char | None = ctypes.c_char.from_buffer(self._memory)
        start = ctypes.addressof(self._first_byte)
        self._arguments = StageArguments(
            ranks=start,
            slots=start + size * RANK_BYTES,
            slot_bytes=SLOT_BYTES,
            spin_ns=round(1e9 * waits.spin_s),
            timeout_ns=round(1e9 * waits.timeout_s),
            rank=rank,
            size=size,
        )
        self._address = ctypes.addressof(self._arguments)
        self._watch = threading.Thread(target=self._until_a_rank_ends, daemon=True)
        self._watch.start()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x, kind = x.contiguous(), SUMMED_TYPES[x.dtype]
        self._check(self._calls.sum(self._address, x.data_ptr(), x.numel(), kind))
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        x, (rows, width) = x.contiguous(), x.shape
        out = x.new_empty((rows, self._size * width)) if self._rank == 0 else None
        to = None if out is None else out.data_ptr()
        row_bytes = width * x.element_size()
        self._check(self._calls.gather(self._address, x.data_ptr(), to, rows, row_bytes))
        return out

    def close(self) -> None:
        """Nobody waits for us any longer; we must not be asked again. Idempotent."""
        if self._first_byte is None:
            return
        self._calls.leave(self._address)
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)  # our own watch ends by it, too
        self._watch.join()
        for connection in self._connections:
            connection.close()
        self._first_byte = None  # what is pointed at cannot be unmapped
        self._memory.close()

    def _until_a_rank_ends(self) -> None:
        """Nothing more is ever sent, so a connection that stirs has ended."""
        poll = select.poll()
        for connection in self._connections:
            poll.register(connection, select.POLLIN)
        poll.poll()
        self._calls.leave(self._address)

    def _check(self, ended: int) -> None:
        if ended == Ended.LATE:
            raise RankLost(f"Timed out after {self._waits.timeout_s:g} s")
        if ended == Ended.GONE:
            raise RankLost("a peer has left")


def _share(store: Store, rank: int, size: int, timeout_s: float) -> Shared | None:
    """None, on all ranks, where the first one has no memory."""
    if rank != 0:
        return shm_meeting.take(store, timeout_s)
    try:
        return shm_meeting.offer(store, size - 1, _num_bytes(size), timeout_s)
    except kv_shm.PoolUnavailable as error:
        logger.info("sums go over gloo: %s", error)
        return None


def _num_bytes(size: int) -> int:
    return size * (RANK_BYTES + 2 * SLOT_BYTES)


def _map(shared: Shared, size: int) -> mmap.mmap:
    try:
        return kv_shm.map_pool(shared.descriptor, _num_bytes(size))
    finally:
        os.close(shared.descriptor)
