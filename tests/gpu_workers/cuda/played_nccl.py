"""Groups with NCCL's face between ranks that are threads: they exchange by gloo, and are as strict.

A call belongs to its device's stream. In a capture nobody is met: a call that was never made before
the capture is refused, since NCCL could not connect then, and what passes between stages has no
place there. `calls` are all that the device was asked for, replays included, in order; all ranks of
a stage must have asked for the same. A group is not given up while a graph holds a call of it: NCCL
would wait for ever.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from gpu_workers.rendezvous import LOOPBACK, distributed
from tests.gpu_workers.cuda.fake_device import FakeDevice, FakeGraph


class Call(NamedTuple):
    """One that was carried out, with the shape of what it was about."""

    kind: str
    shape: tuple[int, ...]


class PlayedGpu(FakeDevice):
    """A device that knows of its graphs, and of the calls of its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.num_captured_calls = self.num_downloads = 0
        self._graphs: list[weakref.ref[FakeGraph]] = []
        self._lock = threading.RLock()  # one thread asks, another may wait

    def capture(self, run: Callable[[], None]) -> FakeGraph:
        graph = super().capture(run)
        self._graphs.append(weakref.ref(graph))
        return graph

    def pass_to(self, at: int) -> None:
        with self._lock:
            super().pass_to(at)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._lock:
            super().upload(source, target)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.num_downloads += 1
        with self._lock:
            super().download(source, target)

    @property
    def num_graphs(self) -> int:
        """Those that somebody still has."""
        if any(graph() is not None for graph in self._graphs):
            gc.collect()
        return sum(graph() is not None for graph in self._graphs)


class PlayedNccl:
    """One rank's end of a group."""

    def __init__(self, gloo: Any, device: PlayedGpu) -> None:
        self._gloo, self._device = gloo, device
        self._made: set[Call] = set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._ask("sum", tensors[0], options, lambda: self._gloo.allreduce(tensors))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        def exchange() -> Any:
            return self._gloo.broadcast(tensors, options)

        return self._ask("broadcast", tensors[0], options, exchange)

    def _allgather_base(self, into: torch.Tensor, part: torch.Tensor, options: Any) -> Any:
        def exchange() -> Any:
            return self._gloo._allgather_base(into, part)

        return self._ask("gather", part, options, exchange)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        assert not self._device.is_capturing, "what passes between stages is no part of a graph"
        self._device.calls.append(Call("send", tuple(tensors[0].shape)))
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        assert not self._device.is_capturing, "what passes between stages is no part of a graph"
        self._device.calls.append(Call("recv", tuple(tensors[0].shape)))
        return self._gloo.recv(tensors, rank, tag)

    def abort(self) -> None:
        assert not self._device.num_graphs, "an abort waits for ever for graphs that hold calls"
        self._gloo.abort()

    def _ask(
        self, kind: str, tensor: torch.Tensor, options: Any, exchange: Callable[[], Any]
    ) -> Any:
        assert tensor.is_contiguous(), "NCCL takes one run of memory"
        call = Call(kind, tuple(tensor.shape))
        if self._device.is_capturing:
            assert options is not None, "a stream of NCCL's own is no part of the capture"
            assert call in self._made, (
                "NCCL has no way for that yet, and can make none in a capture"
            )
            self._device.num_captured_calls += 1
            return None
        self._made.add(call)
        self._device.calls.append(call)
        if options is None or options.asyncOp:
            return exchange()
        self._device.tick()
        exchange().wait()
        return None  # as NCCL's groups do: it is in the stream's order already


def groups_on(device: PlayedGpu) -> Callable[[Any, int, int, timedelta], PlayedNccl]:
    """How `NcclCollectives` makes its groups there."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> PlayedNccl:
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        return PlayedNccl(distributed.ProcessGroupGloo(store, rank, size, options), device)

    return make
