"""Known bytes at the end of every pool, by which a reader sees that it reads what is there.

On some machines CUDA grants peer access, opens the memory, and copies nothing: the way of peer
copies is blocked or redirected (PCIe ACS with a translating IOMMU; vllm-project/vllm#51513,
ggml-org/llama.cpp#21910), no call fails, and texts are wrong. Only reading tells. A pool has a
place beside its blocks where what is read lands, so a GPU that is full reads too.
"""

import ctypes

from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import Mapping

PROOF_BYTES = 4096
SPARE_BYTES = 2 * PROOF_BYTES
"""How much larger than its blocks a pool is: what others read, and where we read others' to."""

_BYTE, _OTHER_BYTE = 0xA5, 0x5A


def write_proof(runtime: CudaRuntime, pool: Mapping) -> None:
    """Into the end of our pool."""
    runtime.fill(_proof_of(pool), _BYTE, PROOF_BYTES)


def is_read_truly(runtime: CudaRuntime, pool: Mapping, own: Mapping, stream: int) -> bool:
    """Whether what we copy out of a pool that we have opened is what its owner put there.

    By way of our own pool: so go the pulls. The place there may have the right bytes from another
    time, so it gets wrong ones before.
    """
    landing, host = _proof_of(own) - PROOF_BYTES, runtime.allocate_pinned(PROOF_BYTES)
    try:
        ctypes.memset(host, _OTHER_BYTE, PROOF_BYTES)
        runtime.copy(landing, host, PROOF_BYTES, stream)
        runtime.copy(landing, _proof_of(pool), PROOF_BYTES, stream)
        runtime.copy(host, landing, PROOF_BYTES, stream)
        runtime.synchronize(stream)
        return ctypes.string_at(host, PROOF_BYTES) == bytes([_BYTE]) * PROOF_BYTES
    finally:
        runtime.synchronize(stream)  # a copy may have been asked for before one that was refused
        runtime.free_pinned(host)


def _proof_of(pool: Mapping) -> int:
    return pool.address + pool.handle.num_bytes - PROOF_BYTES
