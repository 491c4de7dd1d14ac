"""Which GPU a worker takes: its own, or one of too few where that is allowed."""

import logging
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from gpu_workers import worker_engine
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_exchange import CudaExchange, Site
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_routes import Gpu as Place
from gpu_workers.errors import ModelError
from gpu_workers.weight_guest import HolderFailed
from gpu_workers.worker_engine import WorkerEngine, left_unused, usable_gpu
from ipc.cuda_runtime import CudaRuntime, CudaUnavailable
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import RankLayout
from ipc.messages import WorkerConfig
from ipc.vocabulary import DeviceKind, DType, Parallelism, Role, WorkerName
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart
from tests.gpu_workers.cuda_exchange.test_weight_holder import holders

ALONE = Parallelism(1, 1)


def config(model_dir: Path, *, shares: bool) -> WorkerConfig:
    return WorkerConfig(
        name=WorkerName("decode-0"),
        epoch=1,
        role=Role.DECODE,
        parallelism=ALONE,
        endpoint="",
        model_dir=str(model_dir),
        dtype=DType.BF16,
        device=5,
        device_kind=DeviceKind.CUDA,
        share_gpus=shares,
        kv_bytes=1 << 20,
        block_size=16,
        max_context_tokens=64,
        prefill_tokens=64,
        max_batch=4,
    )


@pytest.mark.parametrize(("shares", "expected"), [(True, 1), (False, 5)])
def test_workers_take_turns_on_too_few_gpus_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    opened: list[int] = []

    def open_gpu(index: int, *_: object) -> Gpu:
        opened.append(index)
        raise ModelError("as far as this goes")

    with pytest.raises(ModelError, match="as far as this goes"):
        WorkerEngine(
            config(llama_gqa(tmp_path), shares=shares), lambda event: None, open_gpu=open_gpu
        )
    assert opened == [expected]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can be used here")
def test_where_cuda_cannot_be_used_a_worker_says_why(tmp_path: Path) -> None:
    """Not how many GPUs torch counts: the driver may list eight that cannot be used."""
    asked = config(llama_gqa(tmp_path), shares=True)
    with pytest.raises(CudaUnavailable, match=r"CUDA cannot be used here|no libcudart"):
        WorkerEngine(asked, lambda event: None)


def test_gpus_that_auto_cannot_take_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    def refuse() -> None:
        raise CudaUnavailable("cudaErrorSystemNotReady")

    (tmp_path / "nvidiactl").touch()
    assert left_unused(tmp_path / "nvidiactl", refuse) == "cudaErrorSystemNotReady"
    found = left_unused(tmp_path / "nvidiactl", lambda: None)
    assert found == f"torch {torch.__version__} finds none"  # one that is built for CPUs
    assert left_unused(tmp_path / "none", refuse) is None


def test_a_gpu_that_does_not_open_is_told_in_one_line() -> None:
    def refuse(*_: object) -> Gpu:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy\nSearch for")

    with pytest.raises(CudaUnavailable, match=r"^the GPU cannot be used: CUDA error: .* busy$"):
        usable_gpu(0, load_runtime=lambda: None, open_gpu=refuse)


def engine(
    model_dir: Path, run_dir: Path, device: FakeDevice, shape: Parallelism = ALONE
) -> WorkerEngine:
    """A worker's engine on a played GPU."""
    memory = DeviceMemory(CudaRuntime(FakeCudart()))

    def exchange_on(where: torch.device, layout: RankLayout, label: str) -> CudaExchange:
        site = Site(memory, Place(0, ("GPU-a",)), where, lambda: 0)
        return CudaExchange(layout, label, site)

    def open_gpu(index: int, dtype: DType, limits: StepLimits, *_: object) -> Gpu:
        return Gpu(device, FakeFlashInfer(device), limits)

    asked = config(model_dir, shares=True)
    asked = msgspec.structs.replace(asked, endpoint=f"ipc://{run_dir}/workers", parallelism=shape)
    return WorkerEngine(asked, lambda event: None, open_gpu=open_gpu, exchange_on=exchange_on)


def test_workers_that_share_a_gpu_pay_for_one_copy_of_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model_dir = llama_gqa(tmp_path / "model")
    try:
        engines = [engine(model_dir, tmp_path, FakeDevice()) for _ in range(2)]
        (holder,) = holders(tmp_path)
        prompts = [[1, 2, 3], [7] * 20]
        alone, shared = (Driver(one.executor).greedy(prompts, 4) for one in engines)
        assert alone == shared
        reckoned = [m for m in caplog.messages if m.startswith("of the GPU's memory")]
        assert len(reckoned) == 2
        assert not any("weights" in message for message in reckoned)
    finally:
        for holder in holders(tmp_path):
            os.kill(holder, signal.SIGKILL)


def test_ranks_meet_before_they_wait_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may be held for the one and take the other longer than a meeting's bound."""
    done: list[str] = []

    class Met:
        def close(self) -> None:
            pass

    def meet(*_: object, **__: object) -> Met:
        done.append("met")
        return Met()

    def hold(*_: object, **__: object) -> None:
        done.append("weights")
        raise ModelError("as far as this goes")

    monkeypatch.setattr(worker_engine, "join_gpus", meet)
    monkeypatch.setattr(worker_engine, "held_weights", hold)
    monkeypatch.setattr(worker_engine, "gpu_of", lambda device: Place(0, ("GPU-a",)))
    with pytest.raises(ModelError, match="as far as this goes"):
        engine(llama_gqa(tmp_path / "model"), tmp_path, FakeDevice(), Parallelism(2, 1))
    assert done == ["met", "weights"]


@pytest.mark.parametrize("on_device", [None, object()], ids=["one GPU", "a GPU each"])
def test_ranks_that_have_met_on_one_gpu_reckon_without_graphs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_device: object,
) -> None:
    class Met:
        def __init__(self) -> None:
            self.on_device = on_device

        def close(self) -> None:
            pass

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("as far as this goes")

    monkeypatch.setattr(worker_engine, "join_gpus", lambda *_, **__: Met())
    monkeypatch.setattr(worker_engine, "held_weights", lambda *_, **__: None)
    monkeypatch.setattr(worker_engine, "gpu_of", lambda device: Place(0, ("GPU-a",)))
    monkeypatch.setattr(worker_engine, "build_executor", refuse)
    caplog.set_level(logging.INFO)
    with pytest.raises(ModelError, match="as far as this goes"):
        engine(llama_gqa(tmp_path / "model"), tmp_path, FakeDevice(), Parallelism(2, 1))
    (reckoned,) = (m for m in caplog.messages if m.startswith("of the GPU's memory"))
    assert ("decode graphs" in reckoned) == (on_device is not None)


def test_where_no_holder_comes_up_a_worker_loads_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise HolderFailed("the holder of the weights ended with 1")

    monkeypatch.setattr(worker_engine, "held_weights", refuse)
    one = engine(llama_gqa(tmp_path / "model"), tmp_path, FakeDevice())
    assert len(Driver(one.executor).greedy([[1, 2, 3]], 2)[0]) == 2
    assert "weights are loaded for this worker alone" in caplog.text
