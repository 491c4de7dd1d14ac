"""What the CUDA path asks of a device beside arithmetic: pinned memory, copies, events, graphs.

A seam, so that all above it runs without a GPU: tests put a device on CPU memory here that defers
what a GPU defers and says when something was used too early. One device belongs to one worker, and
all its work is on one stream, in the order of the calls.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

HostArray = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.float64]


class Event(Protocol):
    """A place in the stream's order of work."""

    def record(self) -> None:
        """All asked for so far is before it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come there; at once if it was never recorded."""
        ...


class Graph(Protocol):
    """Work that was captured once, on fixed memory."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One GPU, as its worker uses it."""

    @property
    def torch_device(self) -> torch.device: ...

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Fresh host memory that copies run from and to by themselves; contents are arbitrary."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pinned memory to the device, in the stream's order."""
        ...

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy to pinned memory, in the stream's order: there after an event recorded later."""
        ...

    def event(self) -> Event: ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Record what `run` asks of the device. All graphs share one pool of memory, so one runs
        after the other; the largest is to be captured first."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was asked for."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...


class CudaDevice:
    """A GPU of this machine, by its index here.

    Raises:
        RuntimeError: there is no such GPU.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._graphs = torch.cuda.graph_pool_handle()

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        # torch keeps pinned memory and gives a piece away again only when copies from it are over.
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def capture(self, run: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks after events from a thread of its own, which the default mode forbids
        # to every thread (pytorch#104555).
        with torch.cuda.graph(graph, pool=self._graphs, capture_error_mode="thread_local"):
            run()
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> tuple[int, int]:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return int(free_bytes), int(total_bytes)


def send(
    device: Device, arrays: Sequence[HostArray], into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Arrays of one element type to the device in one copy, each as a tensor of its own.

    Args:
        into: where they go, one after the other; fresh memory if left out.
    """
    sizes = [len(array) for array in arrays]
    dtype = torch.from_numpy(arrays[0][:0]).dtype
    host = device.pinned(sum(sizes), dtype)
    np.concatenate(arrays, out=host.numpy())
    if into is None:
        into = torch.empty(len(host), dtype=dtype, device=device.torch_device)
    target = into[: len(host)]
    device.upload(host, target)
    return list(torch.split(target, sizes))
