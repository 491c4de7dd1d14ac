"""A GPU as `check-gpu` sees it, with a CUDA runtime, a device and a FlashInfer that are played."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_workers.check_gpu.cuda_backend import CudaBackend, Modules
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_routes import Gpu as Place
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

ROOT = Path(__file__).parents[3]
PLAYED = "tests.gpu_workers.check_gpu.played_exporter"
EXPORTER = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", PLAYED)


@dataclass
class PlayedModule:
    """A description of one of FlashInfer's modules, as far as the check looks at it."""

    is_compiled: bool = True
    num_loads: int = 0

    def build_and_load(self) -> None:
        self.num_loads += 1
        self.is_compiled = True


def all_compiled(
    dtypes: Iterable[str], head_dims: Iterable[int], extras: Iterable[str]
) -> Iterator[tuple[str, Callable[[], PlayedModule]]]:
    """Every module was compiled ahead."""
    yield from ((extra, PlayedModule) for extra in extras)
    for head_dim in head_dims:
        yield from ((f"attention {dtype} {head_dim}", PlayedModule) for dtype in dtypes)


def played_gpu(
    *,
    flashinfer: Callable[[FakeDevice], Any] = FakeFlashInfer,
    skips_fences: bool = False,
    modules: Modules = all_compiled,
) -> CudaBackend:
    """One GPU; each call is another process's view of it."""
    device, library = FakeDevice(), FakeCudart()
    memory = DeviceMemory(CudaRuntime(library))
    library.skips_fences = skips_fences

    def make(layout: RankLayout, label: str, **how: Any) -> CudaExchange:
        site = Site(memory, Place(0, ("GPU-a",)), torch.device("cpu"), lambda: 0)
        return CudaExchange(layout, label, site, **how)

    gpu = Gpu(device, flashinfer(device), StepLimits(256, 16))
    return CudaBackend(gpu, make, EXPORTER, modules=modules)
