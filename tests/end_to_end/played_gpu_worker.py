"""The real worker on a GPU that is played: device, FlashInfer and CUDA runtime on CPU memory.

All else of the process is the product's: link, leader, scheduler, graphs, sampler, exchange. Pools
are memory files, which workers open in each other's processes as CUDA IPC does; each worker has a
GPU of its own, and all reach each other.
"""

import zlib
from collections.abc import Callable
from functools import partial
from itertools import permutations

import torch

from gpu_workers import worker
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_routes import Gpu as Place
from gpu_workers.worker_engine import WorkerEngine
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout
from ipc.vocabulary import DType
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda.lagging_device import LaggingDevice
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

NUM_GPUS = 4
UUIDS = tuple(f"GPU-{index}" for index in range(NUM_GPUS))
REACH = set(permutations(range(NUM_GPUS), 2))


class PlayedGpu:
    """The one GPU of this process, whose work on its memory is done later from now on."""

    def __init__(self) -> None:
        self._device = LaggingDevice()
        self._index = 0

    def open(
        self, index: int, dtype: DType, limits: StepLimits, capturing: Callable[[float], None]
    ) -> Gpu:
        assert dtype is not DType.FP32, "attention on GPUs is in 16 bit"
        self._index = index
        self._device.stream.__enter__()  # for as long as the process lives
        return Gpu(self._device, FakeFlashInfer(self._device), limits, capturing)

    def exchange(self, device: torch.device, layout: RankLayout, label: str) -> CudaExchange:
        self._device.shuffle(zlib.crc32(label.encode()))
        library = FakeCudart(num_devices=NUM_GPUS, reach=REACH)
        memory, place = DeviceMemory(CudaRuntime(library)), Place(self._index, UUIDS)
        exchange = CudaExchange(layout, label, Site(memory, place, device, lambda: 0))
        self._device.adopt(exchange.pool)
        return exchange


def play() -> None:
    """From now on this process's worker has a GPU."""
    gpu = PlayedGpu()
    engine: object = partial(WorkerEngine, open_gpu=gpu.open, exchange_on=gpu.exchange)
    worker.WorkerEngine = engine  # type: ignore[misc, assignment]
