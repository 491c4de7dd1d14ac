"""A CUDA runtime library without a GPU: the face that ctypes gives to the real one.

Memory of devices is memory files, so that handles open them in other processes too. What is asked
of a stream is done later, in its order, one thing at a time: when somebody looks at an event or
waits. It is stricter than the real one: arguments must be of the declared types, a copy must
lie within one allocation on either side, and may not cross between GPUs that do not reach each
other. The copies of a batch are done in the opposite order. Every call to copy takes its time on
a played clock; a batch takes a longer one, and then less for each copy.
"""

import ctypes
import itertools
import mmap
import os
import signal
import struct
import threading
from collections.abc import Callable
from typing import Any

from ipc.cuda_runtime import SIGNATURES, SUCCESS, CopyAttributes, IpcHandle
from tests.gpu_workers.cuda_exchange.fake_function import (
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    NAMES,
    NOT_READY,
    NOT_SUPPORTED,
    PEER_UNSUPPORTED,
    Failed,
    FakeFunction,
)
from tests.gpu_workers.cuda_exchange.fake_streams import Allocation, Copy, Event, Stream, advance

HOST = -1
LARGE_BYTES = 1 << 20
CALL_S, BATCH_CALL_S, BATCHED_S = 2e-6, 10e-6, 0.5e-6
_HANDLE = struct.Struct("<4q")  # process, descriptor, size, device
_numbers = itertools.count(1)


class FakeCudart:
    """One process's library.

    Args:
        reach: pairs of different devices that have peer access.
        speeds: bytes per second of copies, by (from, to).

    `fails` makes calls fail by name. `skips_fences` makes every event look as if it were over.
    `refuses_pinning` leaves the host's memory as it is, `dies_at_copy` ends the process at that
    large copy, `garbles` lets copies between GPUs arrive nowhere. `freed_while_open` counts the
    worst of mistakes. One thread calls at a time, and each has its own current device and last
    error.
    """

    def __init__(
        self,
        *,
        num_devices: int = 2,
        reach: set[tuple[int, int]] | None = None,
        version: int = 13000,
    ) -> None:
        self.num_devices, self.reach, self.version = num_devices, reach or set(), version
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.skips_fences = False
        self.refuses_pinning = False
        self.dies_at_copy: int | None = None
        self.garbles = False
        self.slow_factor = 1.0
        self.freed_while_open = 0
        self._lock = threading.RLock()
        self._own_to_each = threading.local()
        self._host_s = 0.0
        self._allocations: dict[int, Allocation] = {}
        self._streams: dict[int, Stream] = {0: Stream(0)}
        self._events: dict[int, Event] = {}
        self._sticky: int | None = None
        self._key_of: dict[int, tuple[int, int]] = {}  # of what is open
        for name in SIGNATURES:
            setattr(self, name, FakeFunction(name, self._guarded(name)))
        self.cudaGetErrorName = self._words(lambda code: NAMES.get(code, b"cudaErrorUnknown"))
        self.cudaGetErrorString = self._words(lambda code: b"as the test wants it")
        self.cudaGetLastError = FakeFunction("", self._take_last_error, returns_code=False)
        LIVING.append(self)

    def end(self) -> None:
        """Its process ends, and all its memory goes with it: nobody may look there any more."""
        LIVING.remove(self)
        for allocation in self._own:
            assert allocation.descriptor is not None
            os.close(allocation.descriptor)
        self._allocations.clear()

    def _words(self, body: Callable[[int], bytes]) -> FakeFunction:
        return FakeFunction("cudaGetError", body, returns_code=False)

    def _guarded(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with self._lock:
                self.calls.append(name)
                try:
                    if name in self.fails or self._sticky is not None:
                        raise Failed(self.fails.get(name, self._sticky))
                    getattr(self, f"_{name}")(*arguments)
                except Failed as failed:
                    self._own_to_each.last_error = failed.args[0]
                    raise

        return call

    def _take_last_error(self) -> int:
        found: int = getattr(self._own_to_each, "last_error", SUCCESS)
        self._own_to_each.last_error = self._sticky or SUCCESS
        return found

    @property
    def _device(self) -> int:
        return getattr(self._own_to_each, "device", 0)

    @property
    def num_allocated(self) -> int:
        return len(self._allocations)

    # ---- devices and memory ---------------------------------------------------------------

    def _cudaRuntimeGetVersion(self, into: Any) -> None:
        into.contents.value = self.version

    def _cudaSetDevice(self, device: int) -> None:
        if not 0 <= device < self.num_devices:
            raise Failed(INVALID_VALUE)
        self._own_to_each.device = device

    def _cudaGetDevice(self, into: Any) -> None:
        into.contents.value = self._device

    def _cudaDeviceCanAccessPeer(self, into: Any, device: int, peer: int) -> None:
        into.contents.value = int((device, peer) in self.reach)

    def _cudaMalloc(self, into: Any, num_bytes: int) -> None:
        descriptor = os.memfd_create("fake-gpu")
        os.ftruncate(descriptor, num_bytes)
        self._map(into, descriptor, num_bytes, self._device)

    def _cudaFree(self, address: int) -> None:
        allocation = self._allocations.pop(address, None)
        if allocation is None:
            raise Failed(INVALID_VALUE)
        self.freed_while_open += OPENED.get(_key(allocation), 0)
        assert allocation.descriptor is not None
        os.close(allocation.descriptor)

    def _cudaMemset(self, address: int, value: int, num_bytes: int) -> None:
        self._within(address, num_bytes)
        self._ask(0, "fill", Copy(address, value, num_bytes, self._speed(0, 0)))

    def _cudaHostAlloc(self, into: Any, num_bytes: int, flags: int) -> None:
        descriptor = os.memfd_create("fake-pinned")
        os.ftruncate(descriptor, num_bytes)
        self._map(into, descriptor, num_bytes, HOST)

    def _cudaFreeHost(self, address: int) -> None:
        allocation = self._allocations.pop(address)
        assert allocation.descriptor is not None
        os.close(allocation.descriptor)

    def _cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> None:
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0, "no whole pages"
        self._allocations[address] = Allocation(None, address, num_bytes, HOST)
        if self.refuses_pinning:
            raise Failed(NOT_SUPPORTED)  # copies take it all the same

    def _cudaHostUnregister(self, address: int) -> None:
        if self._allocations.pop(address).memory is not None or self.refuses_pinning:
            raise Failed(INVALID_VALUE)

    def _cudaIpcGetMemHandle(self, into: Any, address: int) -> None:
        allocation = self._allocations.get(address)  # of the base, not of a place within
        if allocation is None or allocation.device == HOST:
            raise Failed(INVALID_VALUE)
        packed = _HANDLE.pack(*_key(allocation), allocation.num_bytes, allocation.device)
        ctypes.memmove(into, packed, len(packed))

    def _cudaIpcOpenMemHandle(self, into: Any, handle: IpcHandle, flags: int) -> None:
        process, descriptor, num_bytes, device = _HANDLE.unpack_from(bytes(handle))
        if (process, descriptor) in {_key(a) for a in self._own}:
            raise Failed(INVALID_HANDLE)
        if device != self._device and (self._device, device) not in self.reach:
            raise Failed(PEER_UNSUPPORTED)
        try:
            ours = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        except OSError:
            raise Failed(INVALID_HANDLE) from None
        self._map(into, ours, num_bytes, device)
        os.close(ours)
        opened = self._allocations[into.contents.value]
        opened.descriptor = None
        self._key_of[opened.address] = (process, descriptor)
        OPENED[process, descriptor] = OPENED.get((process, descriptor), 0) + 1

    def _cudaIpcCloseMemHandle(self, address: int) -> None:
        if address not in self._key_of:
            raise Failed(INVALID_VALUE)
        OPENED[self._key_of.pop(address)] -= 1
        del self._allocations[address]

    @property
    def _own(self) -> list[Allocation]:
        return [a for a in self._allocations.values() if a.descriptor is not None]

    def _map(self, into: Any, descriptor: int, num_bytes: int, device: int) -> None:
        memory = mmap.mmap(descriptor, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._allocations[address] = Allocation(memory, address, num_bytes, device, descriptor)
        into.contents.value = address

    def _within(self, address: int, num_bytes: int) -> Allocation:
        for allocation in self._allocations.values():
            start, stop = allocation.address, allocation.address + allocation.num_bytes
            if start <= address and address + num_bytes <= stop:
                return allocation
        self._sticky = ILLEGAL_ADDRESS
        raise Failed(ILLEGAL_ADDRESS)

    # ---- copies ---------------------------------------------------------------------------

    def _cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self._host_s += CALL_S
        if size >= LARGE_BYTES:
            self._die_in_time()
        self._ask(stream, "copy", self._copy(to, source, size))

    def _cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int,
        kind: int, stream: int,
    ) -> None:  # fmt: skip
        if width > min(to_pitch, pitch):
            raise Failed(INVALID_VALUE)
        self._host_s += CALL_S
        for row in range(height):
            self._ask(stream, "copy", self._copy(to + row * to_pitch, source + row * pitch, width))

    def _cudaMemcpyBatchAsync(
        self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, first: Any,
        num_attributes: int, stream: int,
    ) -> None:  # fmt: skip
        assert isinstance(attributes.contents, CopyAttributes)
        if stream == 0 or num_attributes != 1 or first[0] != 0:
            raise Failed(INVALID_VALUE)
        if attributes.contents.srcAccessOrder != 1:
            raise Failed(INVALID_VALUE)
        self._host_s += BATCH_CALL_S
        for index in reversed(range(count)):
            copy = self._copy(targets[index], sources[index], sizes[index])
            copy.extra_s = BATCHED_S
            self._ask(stream, "copy", copy)

    def _die_in_time(self) -> None:
        if self.dies_at_copy is not None:
            self.dies_at_copy -= 1
            if not self.dies_at_copy:
                os.kill(os.getpid(), signal.SIGKILL)

    def _copy(self, target: int, source: int, num_bytes: int) -> Copy:
        there = self._within(source, num_bytes).device
        here = self._within(target, num_bytes).device
        if HOST not in (here, there) and here != there and (here, there) not in self.reach:
            raise Failed(ILLEGAL_ADDRESS)
        if self.garbles and here != there and HOST not in (here, there):
            source = target  # nothing arrives
        return Copy(target, source, num_bytes, self._speed(here, there), self._host_s)

    def _speed(self, here: int, there: int) -> float:
        """Bytes per second."""
        full = 20e9 if HOST in (here, there) else 2000e9 if here == there else 400e9
        return full / self.slow_factor

    # ---- streams and events ---------------------------------------------------------------

    def _cudaStreamCreateWithFlags(self, into: Any, flags: int) -> None:
        assert flags == 1, "a stream that waits for the default stream"
        into.contents.value = next(_numbers)
        self._streams[into.contents.value] = Stream(self._device)

    def _cudaStreamSynchronize(self, stream: int) -> None:
        while self._streams[stream].todo:
            advance(self._streams[stream])
        self._host_s = max(self._host_s, self._streams[stream].clock_s)

    def _cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._ask(stream, "wait", (self._events[event], self._events[event].num_asked))

    def _cudaStreamDestroy(self, stream: int) -> None:
        self._cudaStreamSynchronize(stream)
        del self._streams[stream]

    def _cudaEventCreateWithFlags(self, into: Any, flags: int) -> None:
        into.contents.value = next(_numbers)
        self._events[into.contents.value] = Event()

    def _cudaEventRecord(self, event: int, stream: int) -> None:
        recorded = self._events[event]
        recorded.num_asked += 1
        recorded.stream = self._streams[stream]
        self._ask(stream, "record", (recorded, recorded.num_asked, self._host_s))

    def _cudaEventQuery(self, event: int) -> None:
        asked = self._events[event]
        if self.skips_fences:
            return
        if asked.num_done < asked.num_asked:
            assert asked.stream is not None
            advance(asked.stream)
        if asked.num_done < asked.num_asked:
            raise Failed(NOT_READY)

    def _cudaEventSynchronize(self, event: int) -> None:
        asked = self._events[event]
        while asked.num_done < asked.num_asked:
            assert asked.stream is not None
            advance(asked.stream)
        self._host_s = max(self._host_s, asked.at_s)

    def _cudaEventElapsedTime(self, into: Any, first: int, second: int) -> None:
        into.contents.value = 1e3 * (self._events[second].at_s - self._events[first].at_s)

    def _cudaEventDestroy(self, event: int) -> None:
        del self._events[event]

    def finish(self, stream: int) -> None:
        """The device gets on with all that it was asked."""
        with self._lock:
            self._cudaStreamSynchronize(stream)

    def _ask(self, stream: int, what: str, about: Any) -> None:
        self._streams[stream].todo.append((what, about))


LIVING: list[FakeCudart] = []
"""Played processes of this one that have not ended."""

OPENED: dict[tuple[int, int], int] = {}
"""How often each allocation is open in the played processes of this one."""


def _key(allocation: Allocation) -> tuple[int, int]:
    return os.getpid(), allocation.descriptor or 0
