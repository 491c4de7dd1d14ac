"""What a worker on a GPU gives back when it leaves, and who can hold that up: nobody."""

import logging
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_routes import Gpu as Place
from gpu_workers.step_plan import Pull
from gpu_workers.worker_engine import WorkerEngine
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout
from ipc.vocabulary import DType, KVHandle, WorkerName
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart
from tests.gpu_workers.cuda_exchange.fake_function import ILLEGAL_ADDRESS
from tests.gpu_workers.cuda_exchange.other_process import OtherProcess, owner
from tests.gpu_workers.cuda_exchange.rigs import EPOCH, UUIDS
from tests.gpu_workers.cuda_exchange.test_shared_gpus import config

THERE = WorkerName("there")


class Leaving:
    """A worker's engine on a GPU that reaches no other."""

    def __init__(self, model_dir: Path) -> None:
        self.library = FakeCudart()
        asked = msgspec.structs.replace(config(model_dir, shares=False), dtype=DType.FP16)
        self.engine = WorkerEngine(
            asked, lambda event: None, open_gpu=self._open, exchange_on=self._exchange
        )
        self.exchange = self.engine.exchange

    def pull(self, descriptor: int) -> None:
        """From that pool, of which no block will come."""
        self.exchange.map_peer(THERE, EPOCH, self.exchange.layout, descriptor)
        handle = KVHandle(str(THERE.instance), EPOCH, 7, (1,), 16)
        self.exchange.begin(Pull(handle, (0,)))

    def _open(self, *_: object) -> Gpu:
        device = FakeDevice()
        return Gpu(device, FakeFlashInfer(device), limits=_[2])  # type: ignore[arg-type]

    def _exchange(self, where: torch.device, layout: RankLayout, label: str) -> CudaExchange:
        memory = DeviceMemory(CudaRuntime(self.library))
        return CudaExchange(layout, label, Site(memory, Place(1, UUIDS), where, lambda: 0))


@pytest.fixture
def leaving(tmp_path: Path) -> Leaving:
    return Leaving(llama_gqa(tmp_path))


def threads() -> set[str]:
    """Of ours; the end of the process waits for all that are no daemons."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(("bounce", "porter of decode"))}


def test_an_owner_that_stands_still_does_not_hold_up_the_exit_of_who_pulls_from_it_A12_B19(
    leaving: Leaving,
) -> None:
    with OtherProcess(owner, leaving.exchange.layout) as stopped:
        descriptor = stopped.descriptor()
        stopped.stop()
        leaving.pull(descriptor)
        assert threads()
        leaving.engine.close()
        assert not threads()


def test_a_worker_that_leaves_gives_back_all_but_its_pool(leaving: Leaving) -> None:
    """Which others may have open."""
    with OtherProcess(owner, leaving.exchange.layout) as other:
        leaving.pull(other.descriptor())
        leaving.engine.close()
    calls = leaving.library.calls
    assert calls.count("cudaHostRegister") == calls.count("cudaHostUnregister") == 1
    for made, undone in (("StreamCreateWithFlags", "StreamDestroy"), ("HostAlloc", "FreeHost")):
        assert calls.count(f"cuda{made}") == calls.count(f"cuda{undone}")
    assert leaving.library.num_allocated == 1


def test_a_worker_whose_device_failed_leaves_all_the_same(
    leaving: Leaving, caplog: pytest.LogCaptureFixture
) -> None:
    with OtherProcess(owner, leaving.exchange.layout) as stopped:
        descriptor = stopped.descriptor()
        stopped.stop()
        leaving.pull(descriptor)
        leaving.library.fails["cudaStreamSynchronize"] = ILLEGAL_ADDRESS
        with caplog.at_level(logging.WARNING):
            leaving.engine.close()
        assert not threads()
    assert "not all was given back: cudaStreamSynchronize: cudaErrorIllegalAddress" in caplog.text
