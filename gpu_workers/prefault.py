"""Put memory behind a KV pool's pages before they are needed, without delaying anything.

A page that was never written costs its first writer a fault, and on a virtual machine much more
than that: seconds for a gigabyte. So a thread of the lowest priority touches them all, once the
worker is ready to serve.
"""

import mmap
import os
import threading

import torch

from gpu_workers.native_build import native_library
from gpu_workers.native_calls import Calls

LOWEST_PRIORITY = 19


def prefault(pool: torch.Tensor) -> threading.Thread | None:
    """Start touching every page of a pool on CPU; None where there are no compiled kernels.

    The pool's memory must stay mapped until the thread ends, or the process.
    """
    library = native_library()
    if library is None:
        return None
    thread = threading.Thread(
        target=_touch, args=(Calls(library), pool), name="prefault", daemon=True
    )
    thread.start()
    return thread


def _touch(calls: Calls, pool: torch.Tensor) -> None:
    """One call into C, so that the step loop never waits for this thread's turn in Python."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    calls.touch_pages(pool.data_ptr(), pool.numel() * pool.element_size(), mmap.PAGESIZE)
