"""Which GPU a worker takes: its own, or one of too few where that is allowed."""

from pathlib import Path

import pytest
import torch

from gpu_workers.cuda_engine import Gpu
from gpu_workers.errors import ModelError
from gpu_workers.worker_engine import WorkerEngine
from ipc.messages import DeviceKind, WorkerConfig
from ipc.vocabulary import DType, Parallelism, Role, WorkerName
from tests.gpu_workers.checkpoints import llama_gqa


def config(model_dir: Path, *, shares: bool) -> WorkerConfig:
    return WorkerConfig(
        name=WorkerName("decode-0"),
        epoch=1,
        role=Role.DECODE,
        parallelism=Parallelism(1, 1),
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
