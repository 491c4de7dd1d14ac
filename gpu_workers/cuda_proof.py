"""Known bytes at the end of every pool, by which a reader sees that it reads what is there.

On some machines CUDA grants peer access, opens the memory, and copies nothing: the way of peer
copies is blocked or redirected (PCIe ACS with a translating IOMMU; vllm-project/vllm#51513,
ggml-org/llama.cpp#21910), no call fails, and texts are wrong. Only reading tells.
"""

import ctypes

from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import Mapping

PROOF_BYTES = 4096
_BYTE = 0xA5


def write_proof(runtime: CudaRuntime, pool: Mapping) -> None:
    """Into the end of our pool, which is so much larger than its blocks."""
    runtime.fill(_proof_of(pool), _BYTE, PROOF_BYTES)


def is_read_truly(runtime: CudaRuntime, pool: Mapping, scratch: int, stream: int) -> bool:
    """Whether what we copy out of a pool that we have opened is what its owner put there.

    By way of our own GPU's memory (`scratch`, as much as the proof): so go the pulls.
    """
    host = runtime.allocate_pinned(PROOF_BYTES)
    try:
        runtime.copy(scratch, _proof_of(pool), PROOF_BYTES, stream)
        runtime.copy(host, scratch, PROOF_BYTES, stream)
        runtime.synchronize(stream)
        return ctypes.string_at(host, PROOF_BYTES) == bytes([_BYTE]) * PROOF_BYTES
    finally:
        runtime.free_pinned(host)


def _proof_of(pool: Mapping) -> int:
    return pool.address + pool.handle.num_bytes - PROOF_BYTES
