"""Work on the computing stream for pulls to run beside: kernels that read and write memory as fast
as it goes, which is what decode steps do to it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu_workers.check_gpu.backend import Backend

NUM_KERNELS = 80  # on 256 MiB each: some 10 ms, which is longer than the pulls


class Busy:
    """Keeps a device at work, and knows how long that takes by itself."""

    def __init__(self, backend: Backend, num_bytes: int) -> None:
        self._backend = backend
        self._source = backend.place(torch.zeros(1, dtype=torch.int32)).new_zeros(num_bytes // 4)
        self._target = torch.empty_like(self._source)
        self._seconds: list[float] = []
        self._alone_s = min(self._alone() for _ in range(3))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work is under way inside; at the end it is done."""
        self._backend.synchronize()
        began_s = time.perf_counter()
        for _ in range(NUM_KERNELS):
            torch.add(self._source, 1, out=self._target)
        yield
        self._backend.synchronize()
        self._seconds.append(time.perf_counter() - began_s)

    @property
    def slowdown(self) -> float:
        """How many times as long the work took with what ran beside it."""
        return min(self._seconds) / self._alone_s

    def _alone(self) -> float:
        with self.running():
            pass
        return self._seconds.pop()
