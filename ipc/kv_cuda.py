"""KV pools in the memory of GPUs: one plain allocation each, opened by other processes.

A pool's handle travels in a small memory file, the same way as the descriptor of a CPU worker's
pool: the daemon passes it on and need not know what it is. Memory that others have open must be
closed by them before it is given out again, so mappings are counted, and closed by their
importers. The only module of this room that knows torch, and only for views of such memory.
"""

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from ipc.cuda_calls import HANDLE_BYTES
from ipc.cuda_runtime import CudaError, CudaRuntime
from ipc.kv_shm import PoolUnavailable

if TYPE_CHECKING:
    import torch

ROUNDING_BYTES = 2 << 20
NO_HANDLE = "what came is not the handle of a pool in a GPU's memory"
_MAX_DOCUMENT_BYTES = 4096

logger = logging.getLogger(__name__)


class PoolHandle(msgspec.Struct, frozen=True):
    """How to open a pool: CUDA's handle, its size, and the GPU whose memory it is in.

    `handle` is empty where that GPU's memory cannot be shared.
    """

    handle: bytes
    num_bytes: int
    gpu_uuid: str


class Mapping(msgspec.Struct, frozen=True):
    """A pool of another worker at an address of ours, seen from a device of ours."""

    address: int
    handle: PoolHandle
    device: int


def rounded(num_bytes: int) -> int:
    """CUDA cuts smaller allocations out of larger ones, and a handle opens the larger one."""
    return -(-num_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


class DeviceMemory:
    """What one process has of GPUs' memory: pools of its own, and open ones of others.

    Opening a pool twice counts, and a pool of our own process is opened by its own address: CUDA
    refuses to open it.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self._own: dict[bytes, int] = {}
        self._open: dict[tuple[bytes, int], tuple[Mapping, int]] = {}

    def allocate(
        self, num_bytes: int, gpu_uuid: str, *, must_share: bool = True, what: str = "a KV pool"
    ) -> Mapping:
        """A zeroed pool on the current device that others may open.

        Args:
            must_share: it is of no use otherwise.
            what: it is for, in the words of an error.

        Raises:
            PoolUnavailable: the device has not that much left, or cannot share it.
        """
        size, device = rounded(num_bytes), self.runtime.device
        try:
            address = self.runtime.allocate(size)
        except CudaError as error:
            raise PoolUnavailable(
                f"{what} of {size / 2**30:.2f} GiB cannot be had on GPU {device}: {error}"
            ) from error
        try:
            handle = self.runtime.export(address)
        except CudaError as error:
            if must_share:
                self.runtime.free(address)
                raise PoolUnavailable(f"GPU {device} does not share memory: {error}") from error
            logger.warning("GPU %d does not share memory: %s", device, error)
            handle = b""
        else:
            self._own[handle] = address
        return Mapping(address, PoolHandle(handle, size, gpu_uuid), device)

    def free(self, pool: Mapping) -> None:
        """Of a pool that `allocate` made, when nobody has it open any more."""
        self._own.pop(pool.handle.handle, None)
        self.runtime.free(pool.address)

    def open(self, handle: PoolHandle, device: int) -> Mapping:
        """Map a pool as seen from a device of ours.

        Raises:
            PoolUnavailable: it cannot be opened there; names the call that failed.
        """
        if (own := self._own.get(handle.handle)) is not None:
            return Mapping(own, handle, device)
        key = (handle.handle, device)
        if key in self._open:
            mapping, count = self._open[key]
            self._open[key] = (mapping, count + 1)
            return mapping
        mapping = Mapping(self._map(handle, device), handle, device)
        self._open[key] = (mapping, 1)
        return mapping

    def close(self, mapping: Mapping) -> None:
        """Undo one `open`, when no copy reads there any more."""
        if mapping.handle.handle in self._own:
            return
        key = (mapping.handle.handle, mapping.device)
        _, count = self._open[key]
        if count > 1:
            self._open[key] = (mapping, count - 1)
            return
        del self._open[key]
        with self.runtime.using(mapping.device):
            self.runtime.close(mapping.address)

    def _map(self, handle: PoolHandle, device: int) -> int:
        try:
            with self.runtime.using(device):
                return self.runtime.open(handle.handle)
        except CudaError as error:
            raise PoolUnavailable(
                f"a pool on GPU {handle.gpu_uuid} cannot be opened from device {device}: {error}"
            ) from error


def write_handle(handle: PoolHandle, label: str) -> int:
    """A descriptor of a memory file that holds the handle."""
    descriptor = os.memfd_create(f"distserved-{label}-handle", os.MFD_CLOEXEC)
    os.pwrite(descriptor, document_of(handle), 0)
    return descriptor


def document_of(handle: PoolHandle) -> bytes:
    """What tells others how to open it."""
    return orjson.dumps(msgspec.to_builtins(handle))


def read_handle(descriptor: int) -> PoolHandle:
    """What `write_handle` wrote.

    Raises:
        PoolUnavailable: it is something else, such as the pool of a worker on the CPU.
    """
    document = b""
    with suppress(OSError):
        document = os.pread(descriptor, _MAX_DOCUMENT_BYTES, 0)
    handle = parse_handle(document)
    if not handle.handle:
        raise PoolUnavailable(NO_HANDLE)
    return handle


def parse_handle(document: bytes) -> PoolHandle:
    """The mirror of `document_of`. Raises PoolUnavailable: it is something else."""
    with suppress(ValueError):
        handle = msgspec.convert(orjson.loads(document), PoolHandle)
        if len(handle.handle) in (0, HANDLE_BYTES):
            return handle
    raise PoolUnavailable(NO_HANDLE)


def as_bytes(address: int, num_bytes: int, device: "torch.device") -> "torch.Tensor":
    """A tensor (num_bytes,) of that memory, which it does not own."""
    import torch

    construct: Any = torch._C._construct_storage_from_data_pointer
    storage = construct(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
