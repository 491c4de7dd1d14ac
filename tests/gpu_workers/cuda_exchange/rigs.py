"""Instances of several ranks on played GPUs, their pools filled from one reference."""

import os
from collections.abc import Sequence

import torch

from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_routes import Gpu
from gpu_workers.step_plan import Pull, PullResult
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout, Span
from ipc.vocabulary import DType, KVHandle, WorkerName
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart
from tests.gpu_workers.cuda_exchange.fake_function import NOT_SUPPORTED

NUM_LAYERS, NUM_HEADS, NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 4, 4, 8, 4, 8
UUIDS = ("GPU-a", "GPU-b")
CPU = torch.device("cpu")
EPOCH = 5
NEIGHBOURS = {(0, 1), (1, 0)}


def layout(layers: Span, heads: Span, num_blocks: int = NUM_BLOCKS) -> RankLayout:
    return RankLayout(layers, heads, num_blocks, BLOCK_SIZE, HEAD_DIM, DType.BF16)


WHOLE = layout(Span(0, NUM_LAYERS), Span(0, NUM_HEADS))
LARGE = RankLayout(Span(0, 4), Span(0, 4), 48, 64, 128, DType.BF16)
"""Half a MiB a block: as much as six slots of the host's memory hold, of which there are four."""


def ranks(tp: int, pp: int) -> list[RankLayout]:
    """The pools of an instance of that shape, stage by stage."""
    heads, layers = NUM_HEADS // tp, NUM_LAYERS // pp
    return [
        layout(Span(stage * layers, (stage + 1) * layers), Span(rank * heads, (rank + 1) * heads))
        for stage in range(pp)
        for rank in range(tp)
    ]


def reference(seed: int = 0) -> torch.Tensor:
    """[blocks, heads, layers, 2, P, D] of a whole instance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WHOLE.shape, generator=generator).to(torch.bfloat16)


def part(of: torch.Tensor, rank: RankLayout) -> torch.Tensor:
    heads, layers = rank.heads, rank.layers
    return of[:, heads.start : heads.stop, layers.start : layers.stop]


PROCESSES: list["Process"] = []
"""Those that have not been closed."""


class Process:
    """A played process with one exchange; its GPU is that of its index."""

    def __init__(
        self,
        rank: RankLayout,
        *,
        gpu: int = 0,
        reach: set[tuple[int, int]] | None = None,
        version: int = 13000,
        batch_below: int | None = None,
        sees: Sequence[str] = UUIDS,
        refuses: str = "",
    ) -> None:
        self.library = FakeCudart(reach=reach, version=version)
        if refuses:
            self.library.fails[refuses] = NOT_SUPPORTED
        self.memory = DeviceMemory(CudaRuntime(self.library))
        self.compute_stream = self.memory.runtime.make_stream()
        self.exchange = CudaExchange(
            rank,
            "played",
            Site(self.memory, Gpu(gpu, tuple(sees)), CPU, lambda: self.compute_stream),
            batch_below=batch_below,
        )
        PROCESSES.append(self)

    def close(self) -> None:
        """As at the end of a worker."""
        PROCESSES.remove(self)
        self.exchange.close()

    def meet(self, others: Sequence["Process"], instance: str = "there") -> None:
        """Map the pools of an instance's ranks."""
        for rank, other in enumerate(others):
            descriptor = os.dup(other.exchange.descriptor)
            name = WorkerName(instance, 0, rank)
            self.exchange.map_peer(name, EPOCH, other.exchange.layout, descriptor)

    def pull(
        self,
        blocks: Sequence[int],
        into: Sequence[int],
        request_id: int = 7,
        *,
        owner: str = "there",
        epoch: int = EPOCH,
    ) -> None:
        handle = KVHandle(owner, epoch, request_id, tuple(blocks), BLOCK_SIZE * len(into))
        self.exchange.begin(Pull(handle, tuple(into)))

    def until_finished(self) -> list[int]:
        """Look as often as it takes; the requests whose pulls have ended."""
        return [result.request_id for result in self.until_results()]

    def until_results(self) -> list[PullResult]:
        while not (results := self.exchange.finished()):
            pass
        return results


def far(rank: RankLayout = WHOLE) -> Process:
    """On a GPU that reaches no other."""
    return Process(rank, gpu=1)


def filled(process: Process, whole: torch.Tensor) -> Process:
    process.exchange.pool.copy_(part(whole, process.exchange.layout))
    return process


def exporters(tp: int, pp: int, gpu: int = 0) -> list[Process]:
    """The ranks of an instance, with what belongs there in their pools."""
    return [filled(Process(rank, gpu=gpu), reference()) for rank in ranks(tp, pp)]
