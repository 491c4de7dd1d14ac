"""A worker's engine as its configuration asks for it, on a GPU that is a fake."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers import worker_engine
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.engine import PrivatePool
from gpu_workers.errors import ModelError
from gpu_workers.worker_engine import WorkerEngine
from ipc.kv_layout import RankLayout
from ipc.messages import Loading, WorkerConfig
from ipc.vocabulary import DeviceKind, DType, Parallelism, Role, WorkerName
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer

GIB = 1 << 30


class FakePool(PrivatePool):
    """A pool that others could open by its descriptor."""

    descriptor = 3

    def __init__(self, device: torch.device, layout: RankLayout, label: str) -> None:
        super().__init__(layout, device)
        self.layout = layout
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("llama"), head_dim=80)


def config(model_dir: Path, **changes: Any) -> WorkerConfig:
    given = {
        "name": WorkerName("decode-0", 0, 0),
        "epoch": 1,
        "role": Role.DECODE,
        "parallelism": Parallelism(),
        "endpoint": "",
        "model_dir": str(model_dir),
        "dtype": DType.FP16,
        "device_kind": DeviceKind.CUDA,
        "kv_bytes": 1 << 20,
        "block_size": 8,
        "max_context_tokens": 64,
        "prefill_tokens": 32,
        "max_batch": 4,
    }
    return WorkerConfig(**{**given, **changes})


class Built:
    """An engine on a fake GPU, and what was told while it was built."""

    def __init__(self, worker: WorkerConfig, total_bytes: int = 80 * GIB) -> None:
        self.told: list[Loading] = []
        self.device = FakeDevice(total_bytes)
        self.limits: StepLimits | None = None
        self.engine = WorkerEngine(
            worker, self.told.append, open_gpu=self._open, exchange_on=FakePool
        )

    def _open(self, index: int, dtype: DType, limits: StepLimits, capturing: Any) -> Gpu:
        self.limits = limits
        return Gpu(self.device, FakeFlashInfer(self.device), limits, capturing)


def test_a_block_of_the_pool_is_kept_for_padding_and_not_told_of(model_dir: Path) -> None:
    engine = Built(config(model_dir)).engine
    assert len(engine.exchange.pool) == engine.layout.num_blocks + 1
    assert engine.layout.head_dim == 128  # of the model's 80


def test_it_tells_of_weights_then_of_graphs(model_dir: Path) -> None:
    told = Built(config(model_dir)).told
    stages = list(dict.fromkeys(loading.stage for loading in told))
    assert stages == ["loading weights", "capturing decode graphs"]
    assert told[-1].fraction == 1.0


def test_its_largest_step_is_the_longest_prompt(model_dir: Path) -> None:
    assert Built(config(model_dir)).limits == StepLimits(64, 4)
    assert Built(config(model_dir, prefill_tokens=500)).limits == StepLimits(500, 4)


def test_two_steps_of_a_sequence_may_be_under_way(model_dir: Path) -> None:
    assert Built(config(model_dir)).engine.executor.max_in_flight == 2


def test_a_share_of_the_memory_decides_how_many_blocks_there_are(model_dir: Path) -> None:
    small, large = (
        Built(config(model_dir, gpu_memory_utilization=share), total_bytes=2 * GIB).engine
        for share in (0.62, 0.64)
    )
    more = (large.layout.num_blocks - small.layout.num_blocks) * small.layout.block_bytes
    assert more == pytest.approx(0.02 * 2 * GIB, rel=0.01)


def test_what_does_not_fit_is_refused_before_anything_is_taken(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"1\.00 GiB free of 1\.00 GiB.*weights .*KV cache"):
        Built(config(model_dir), total_bytes=GIB)


def test_on_a_cpu_all_blocks_are_told_of_and_one_step_is_under_way(model_dir: Path) -> None:
    engine = Built(config(model_dir, device_kind=DeviceKind.CPU)).engine
    assert engine.layout.num_blocks == len(engine.exchange.pool)
    assert engine.layout.head_dim == 80
    assert engine.executor.max_in_flight == 1
    engine.close()


def test_an_engine_that_is_closed_parts_from_its_peers(model_dir: Path) -> None:
    engine = Built(config(model_dir)).engine
    engine.close()
    assert isinstance(engine.exchange, FakePool)
    assert engine.exchange.is_closed


def test_an_engine_that_could_not_be_built_leaves_no_pool_open(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakePool] = []

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("the weights are not the model's")

    def exchange_on(*where: Any) -> FakePool:
        made.append(FakePool(*where))
        return made[-1]

    built = Built(config(model_dir))
    monkeypatch.setattr(worker_engine, "build_executor", refuse)
    with pytest.raises(ModelError, match="weights are not"):
        WorkerEngine(
            config(model_dir), built.told.append, open_gpu=built._open, exchange_on=exchange_on
        )
    assert [pool.is_closed for pool in made] == [True]
