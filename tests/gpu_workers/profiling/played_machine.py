"""A machine with GPUs that are played: where `distserve profile` measures in tests."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_routes import Gpu as Seen
from gpu_workers.profiling import ranks
from gpu_workers.profiling.gpu_place import GpuPlace
from gpu_workers.profiling.places import CpuPlace, Place
from gpu_workers.profiling.subject import Subject
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout
from tests.gpu_workers.check_gpu.played_gpu import EXPORTER
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

ROOT = Path(__file__).parents[3]
PLAYED = "tests.gpu_workers.profiling.played_machine"
RANK = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", PLAYED)
TOTAL_BYTES = 4 << 30


class PlayedMachine:
    """All its ranks share one GPU, so they talk by gloo, and their number is no matter."""

    rank_command: Sequence[str] = RANK

    def __init__(self, num_gpus: int = 8) -> None:
        self.num_gpus = num_gpus

    def place(self, subject: Subject, number: int) -> Place:
        return CpuPlace() if subject.first_gpu is None else self.gpu_place(subject)

    def gpu_place(self, subject: Subject) -> GpuPlace:
        device = FakeDevice(TOTAL_BYTES)
        memory = DeviceMemory(CudaRuntime(FakeCudart()))

        def make(layout: RankLayout, label: str) -> CudaExchange:
            where = torch.device("cpu")
            seen = Seen(0, ("GPU-a",))
            return CudaExchange(layout, label, Site(memory, seen, where, lambda: 0))

        limits = StepLimits(subject.max_context_tokens, subject.max_batch)
        return GpuPlace(
            Gpu(device, FakeFlashInfer(device), limits),
            device_name="a played GPU",
            uuid="GPU-a",
            make_exchange=make,
            exporter_command=EXPORTER,
        )


if __name__ == "__main__":
    sys.exit(ranks.main(sys.argv[1:], PlayedMachine()))
