"""Buffers that are allocated once and used again in every step.

Fresh outputs cost page faults (7 to 8 % of a step of a small model), so operations write into
named buffers that only ever grow.
"""

import ctypes

import torch

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more on 64-bit systems


class Scratch:
    """Named, growing buffers of one element type, in a device's memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.dtype = dtype
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The buffer of that name, seen in this shape; contents are arbitrary."""
        size = 1
        for extent in shape:
            size *= extent
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype or self.dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


def keep_freed_memory() -> None:
    """Let malloc keep what torch frees, so that outputs it allocates itself reuse touched pages.

    Process-wide, and glibc only (elsewhere nothing happens); see mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
