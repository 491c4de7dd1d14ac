"""How bytes of one peer's pool reach ours: within the GPU, by peer access, or through the host.

Chosen once per peer. Where the peer's GPU is another and ours cannot read its memory, the pool is
opened on that GPU itself (which costs a context there), and bytes go through pinned memory of the
host, in slots, so that both ways are busy at a time. Reading stays one-sided: the owner of the
pool has no part in it. All of a route's copies are done when its stream has come to their end.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum
from itertools import cycle
from typing import Protocol

import msgspec

from gpu_workers.cuda_copies import CopyPlan, Run, all_runs, staged
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory, Mapping, PoolHandle
from ipc.kv_shm import PoolUnavailable

logger = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20
NUM_SLOTS = 4
PROBE_BYTES = 64 << 20


class PullPath(StrEnum):
    """What bytes pass on their way, the quickest first."""

    LOCAL = "local"
    PEER = "peer"
    HOST = "host"


SLOW_BELOW: dict[PullPath, float] = {
    PullPath.LOCAL: 200e9,  # any data-centre GPU copies within its memory at several times that
    PullPath.PEER: 10e9,  # PCIe 3 x16 gives 12 GB/s, NVLink much more
    PullPath.HOST: 2e9,
}
"""Bytes per second below which something is wrong with the way, and not with its kind."""


class Gpu(msgspec.Struct, frozen=True):
    """One worker's device, and the others that its process sees: their UUIDs by index."""

    index: int
    uuids: tuple[str, ...]

    @property
    def uuid(self) -> str:
        return self.uuids[self.index]


class Route(Protocol):
    """The way from one peer's pool."""

    path: PullPath
    mapping: Mapping

    def copy(self, plan: CopyPlan, target: int, stream: int) -> None:
        """Ask for a plan's copies, from the peer's pool to the one at `target`; does not wait."""
        ...

    def close(self) -> None:
        """Unmap the pool; none of the copies may be under way."""
        ...


def open_route(memory: DeviceMemory, gpu: Gpu, handle: PoolHandle) -> Route:
    """The best way to a pool that there is.

    Raises:
        PoolUnavailable: there is none; says what was tried.
    """
    if handle.gpu_uuid == gpu.uuid:
        return DirectRoute(memory, memory.open(handle, gpu.index), PullPath.LOCAL)
    if handle.gpu_uuid not in gpu.uuids:  # not ours to ask about; the driver knows
        return DirectRoute(memory, memory.open(handle, gpu.index), PullPath.PEER)
    theirs = gpu.uuids.index(handle.gpu_uuid)
    if memory.runtime.can_access(gpu.index, theirs):
        try:
            return DirectRoute(memory, memory.open(handle, gpu.index), PullPath.PEER)
        except PoolUnavailable as error:
            logger.warning("peer access from GPU %d to %d fails: %s", gpu.index, theirs, error)
    return HostRoute(memory, memory.open(handle, theirs), gpu)


class DirectRoute:
    """The pool is mapped where our own GPU reads it."""

    def __init__(self, memory: DeviceMemory, mapping: Mapping, path: PullPath) -> None:
        self.path = path
        self.mapping = mapping
        self._memory = memory
        self._runtime: CudaRuntime = memory.runtime

    def copy(self, plan: CopyPlan, target: int, stream: int) -> None:
        runtime, source = self._runtime, self.mapping.address
        for run in plan.runs:
            runtime.copy(target + run.target, source + run.source, run.num_bytes, stream)
        self._copy_small(plan.batch, target, stream)
        for rows in plan.rows:
            runtime.copy_rows(
                (target + rows.target, rows.target_pitch),
                (source + rows.source, rows.source_pitch),
                (rows.width, rows.height),
                stream,
            )

    def close(self) -> None:
        self._memory.close(self.mapping)

    def _copy_small(self, runs: Sequence[Run], target: int, stream: int) -> None:
        source = self.mapping.address
        copies = [(target + run.target, source + run.source, run.num_bytes) for run in runs]
        if copies and self._runtime.has_batches:
            self._runtime.copy_batch(copies, stream)
            return
        for copy in copies:
            self._runtime.copy(*copy, stream)


class _Slot:
    """A part of the pinned memory, and when it is full and when it may be filled again."""

    def __init__(self, runtime: CudaRuntime, address: int, ours: int, theirs: int) -> None:
        self.address = address
        with runtime.using(theirs):
            self.filled = runtime.make_event()
        with runtime.using(ours):
            self.emptied = runtime.make_event()


class HostRoute:
    """Through pinned memory: filled on a stream of the peer's GPU, emptied on ours.

    An event that was never recorded holds nobody up, so the first filling of a slot waits for none.
    """

    path = PullPath.HOST

    def __init__(self, memory: DeviceMemory, mapping: Mapping, gpu: Gpu) -> None:
        self.mapping = mapping
        self._memory = memory
        self._runtime = runtime = memory.runtime
        self._pinned = runtime.allocate_pinned(NUM_SLOTS * SLOT_BYTES)
        with runtime.using(mapping.device):
            self._filling = runtime.make_stream()
        addresses = range(self._pinned, self._pinned + NUM_SLOTS * SLOT_BYTES, SLOT_BYTES)
        self._slots = [_Slot(runtime, at, gpu.index, mapping.device) for at in addresses]
        self._next = cycle(self._slots)

    def copy(self, plan: CopyPlan, target: int, stream: int) -> None:
        runtime, source = self._runtime, self.mapping.address
        for parts in staged(all_runs(plan), SLOT_BYTES):
            slot = next(self._next)
            runtime.wait_for(self._filling, slot.emptied)
            for run, offset in parts:
                at = slot.address + offset
                runtime.copy(at, source + run.source, run.num_bytes, self._filling)
            runtime.record(slot.filled, self._filling)
            runtime.wait_for(stream, slot.filled)
            for run, offset in parts:
                runtime.copy(target + run.target, slot.address + offset, run.num_bytes, stream)
            runtime.record(slot.emptied, stream)

    def close(self) -> None:
        self._runtime.synchronize(self._filling)
        for slot in self._slots:
            self._runtime.destroy_event(slot.filled)
            self._runtime.destroy_event(slot.emptied)
        self._runtime.destroy_stream(self._filling)
        self._runtime.free_pinned(self._pinned)
        self._memory.close(self.mapping)


def measure(runtime: CudaRuntime, route: Route, stream: int) -> float:
    """Bytes per second of one large copy; reads what is in the peer's pool, and drops it."""
    num_bytes = min(PROBE_BYTES, route.mapping.handle.num_bytes)
    scratch = runtime.allocate(num_bytes)
    events = [runtime.make_event(is_timed=True) for _ in range(2)]
    plan = CopyPlan((Run(0, 0, num_bytes),), (), ())
    try:
        route.copy(plan, scratch, stream)  # the first one may have to set up the way
        runtime.record(events[0], stream)
        route.copy(plan, scratch, stream)
        runtime.record(events[1], stream)
        runtime.await_event(events[1])
        return num_bytes / max(runtime.seconds_between(*events), 1e-9)
    finally:
        runtime.synchronize(stream)
        for event in events:
            runtime.destroy_event(event)
        runtime.free(scratch)
