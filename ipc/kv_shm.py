"""KV pools of CPU workers: anonymous memory files, mapped by their owner and by its importers.

A memory file has no name that could leak or be taken over: it lives as long as somebody holds it
and is gone with the last holder. Each incarnation of a worker makes a fresh one.
"""

import mmap
import os

import psutil


class PoolUnavailable(Exception):
    """The memory for a pool cannot be had."""


def create(num_bytes: int, label: str) -> int:
    """A descriptor of a new memory file, its memory reserved now, so that a full machine is an
    error here and not a bus error later.

    Raises:
        PoolUnavailable: there is not that much memory.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:  # an anonymous file has no other limit than the kernel's OOM killer
        raise PoolUnavailable(
            f"a KV pool of {num_bytes / 2**30:.2f} GiB was asked for, "
            f"{available / 2**30:.2f} GiB of memory are available"
        )
    descriptor = os.memfd_create(f"distserved-{label}", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise PoolUnavailable(
            f"a KV pool of {num_bytes / 2**30:.2f} GiB cannot be had: {error.strerror}"
        ) from error
    return descriptor


def map_pool(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a whole pool, readable and writable (torch wants both), shared with all who map it.

    Raises:
        PoolUnavailable: the file is smaller than the layout says, or cannot be mapped.
    """
    size = os.fstat(descriptor).st_size
    if size != num_bytes:
        raise PoolUnavailable(f"the pool has {size} bytes where its layout says {num_bytes}")
    try:
        return mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise PoolUnavailable(f"the pool cannot be mapped: {error.strerror}") from error
