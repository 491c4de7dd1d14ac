"""Memory of the host that two processes share, in slots that copies run from and to by themselves.

Between two GPUs of which one cannot read the other: filled by the one's process, emptied by the
other's. A memory file, pinned by both (`cudaHostRegister` takes shared mappings; torch's own shared
tensors are pinned so). Where that is refused, copies still work, only slower.
"""

import ctypes
import logging
import os

from ipc import kv_shm
from ipc.cuda_runtime import CudaError, CudaRuntime

logger = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20
NUM_SLOTS = 4
TOTAL_BYTES = NUM_SLOTS * SLOT_BYTES


def create(label: str) -> int:
    """A descriptor of fresh slots. Raises PoolUnavailable: no memory."""
    return kv_shm.create(TOTAL_BYTES, f"{label}-slots")


class SharedSlots:
    """The slots as this process has them.

    Args:
        descriptor: of `create`, perhaps in another process; taken over.

    `is_pinned` says whether copies may be made together: not of other memory.

    Raises:
        PoolUnavailable: it is not that, or cannot be mapped.
    """

    def __init__(self, runtime: CudaRuntime, descriptor: int) -> None:
        self._runtime = runtime
        try:
            self._mapping = kv_shm.map_pool(descriptor, TOTAL_BYTES)
        finally:
            os.close(descriptor)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(self._anchor)
        self.is_pinned = self._pin()

    def at(self, slot: int) -> int:
        """The address of a slot."""
        return self.address + slot * SLOT_BYTES

    def close(self) -> None:
        """When no copy is under way in either direction here."""
        if self.is_pinned:
            self._runtime.unpin(self.address)
        self._anchor = None  # else the mapping counts as in use
        self._mapping.close()

    def _pin(self) -> bool:
        try:
            self._runtime.pin(self.address, TOTAL_BYTES)
        except CudaError as error:
            logger.warning("pulls through the host's memory are slow: it is not pinned: %s", error)
            return False
        return True
