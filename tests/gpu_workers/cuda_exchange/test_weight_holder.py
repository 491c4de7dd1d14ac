"""Weights held once for several workers: what they get, who starts it, who outlives whom."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from gpu_workers.collectives import Alone
from gpu_workers.cuda_routes import Gpu
from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, open_weights, pool_layout
from gpu_workers.held_weights import GpuSegments, HeldWeights, HostSegments, Recorder, stacked
from gpu_workers.models.config import read_config
from gpu_workers.weight_holder import HolderFailed, Order, held_weights
from gpu_workers.weights import Cut, DummyWeights
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import Span
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import llama_gqa, opt_pre_norm
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

SHAPES = {"a": (4, 6), "b": (2, 6), "norm": (6,)}


def order_of(model_dir: Path) -> Order:
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=64)
    return Order(spec, "cpu")


@contextmanager
def daemon_for(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the daemon's place; holders of that directory end with it."""
    with subprocess.Popen(["sleep", "1000"]) as daemon:
        try:
            yield daemon
        finally:
            daemon.kill()
            for holder in holders(run_dir):
                with suppress(ProcessLookupError):
                    assert has_ended(holder)


def holders(run_dir: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "weight-holder" in (process.info["cmdline"] or ())
        and any(str(run_dir) in word for word in process.info["cmdline"])
    ]


def has_ended(process: int) -> bool:
    """Within a bound that a busy machine keeps, too."""
    with suppress(ProcessLookupError):
        watched = select.poll()  # played GPUs have had a thousand descriptors by now
        watched.register(os.pidfd_open(process), select.POLLIN)
        return bool(watched.poll(30_000))
    return True


def logits_of(model_dir: Path, weights: HeldWeights | None) -> torch.Tensor:
    order, config = order_of(model_dir), read_config(str(model_dir))
    layout = pool_layout(config, dtype=DType.FP32, block_size=16, kv_bytes=1 << 20)
    executor = build_executor(
        config, order.spec, PrivatePool(layout), collectives=Alone(), weights=weights
    )
    with torch.inference_mode():
        hidden = torch.linspace(-1, 1, config.hidden_size).expand(2, -1)
        logits = executor.model.logits(hidden)
    assert logits is not None
    return logits.clone()


@pytest.mark.parametrize("make", [llama_gqa, opt_pre_norm])
def test_a_model_of_held_weights_computes_what_one_of_its_own_does(
    tmp_path: Path, make: object
) -> None:
    assert callable(make)
    model_dir = make(tmp_path / "model")
    with daemon_for(tmp_path) as daemon:
        held = held_weights(order_of(model_dir), tmp_path, daemon.pid)
        assert torch.equal(logits_of(model_dir, held), logits_of(model_dir, None))


def test_workers_share_one_holder_which_ends_with_the_daemon(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path / "model")
    with daemon_for(tmp_path) as daemon:
        held_weights(order_of(model_dir), tmp_path, daemon.pid)
        held_weights(order_of(model_dir), tmp_path, daemon.pid)
        (holder,) = holders(tmp_path)
        assert os.getsid(holder) == holder  # killing the worker that started it leaves it alone
        daemon.kill()
        assert has_ended(holder)


def test_a_holder_that_dies_takes_nothing_away_and_is_replaced(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path / "model")
    with daemon_for(tmp_path) as daemon:
        first = held_weights(order_of(model_dir), tmp_path, daemon.pid)
        (holder,) = holders(tmp_path)
        os.kill(holder, signal.SIGKILL)
        assert has_ended(holder)
        second = held_weights(order_of(model_dir), tmp_path, daemon.pid)
        name = "model.norm.weight"
        assert torch.equal(first.take(name), second.take(name))
        assert holders(tmp_path) != [holder]


def test_a_holder_that_cannot_load_says_so_at_once(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path / "model")
    (model_dir / "model.safetensors").unlink()
    with daemon_for(tmp_path) as daemon, pytest.raises(HolderFailed, match="ended with 1"):
        held_weights(order_of(model_dir), tmp_path, daemon.pid)


def test_other_weights_have_another_holder(tmp_path: Path) -> None:
    first, second = order_of(tmp_path / "a"), order_of(tmp_path / "b")
    assert first.name != second.name


def recorded(segment_bytes: int) -> tuple[Recorder, list[torch.Tensor]]:
    source = DummyWeights(SHAPES, torch.float32)
    recorder = Recorder(source, HostSegments(), segment_bytes=segment_bytes)
    return recorder, [recorder.take("a"), recorder.take("b"), recorder.take("norm")]


def test_tensors_that_lie_side_by_side_are_stacked_without_a_copy() -> None:
    _, (a, b, _) = recorded(segment_bytes=4096)
    whole = stacked([a, b])
    assert torch.equal(whole, torch.cat([a, b]))
    assert whole.data_ptr() == a.data_ptr()


def test_tensors_of_different_segments_or_orders_are_copied() -> None:
    _, (a, b, _) = recorded(segment_bytes=96)
    assert torch.equal(stacked([a, b]), torch.cat([a, b]))
    assert stacked([a, b]).data_ptr() != a.data_ptr()
    _, (a, b, _) = recorded(segment_bytes=4096)
    assert torch.equal(stacked([b, a]), torch.cat([b, a]))


def test_a_tensor_larger_than_a_segment_has_one_of_its_own() -> None:
    recorder, _ = recorded(segment_bytes=64)
    assert recorder.contents.segments == (96, 64, 64)


def test_parts_of_a_tensor_are_told_apart() -> None:
    recorder = Recorder(DummyWeights(SHAPES, torch.float32), HostSegments())
    halves = [recorder.take("a", Cut(0, Span(start, start + 2))) for start in (0, 2)]
    memory = [HostSegments().open(os.dup(recorder.descriptors[0]), recorder.contents.segments[0])]
    held = HeldWeights(recorder.contents, memory, torch.float32)
    assert torch.equal(held.take("a", Cut(0, Span(2, 4))), halves[1])
    assert not torch.equal(halves[0], halves[1])


def test_weights_on_a_gpu_are_opened_by_ipc_from_another_process() -> None:
    there, here = (
        GpuSegments(
            DeviceMemory(CudaRuntime(FakeCudart())), Gpu(0, ("GPU-a",)), torch.device("cpu")
        )
        for _ in range(2)
    )
    recorder = Recorder(DummyWeights(SHAPES, torch.float32), there, segment_bytes=1 << 20)
    kept = recorder.take("a")
    memory = [here.open(os.dup(recorder.descriptors[0]), recorder.contents.segments[0])]
    found = HeldWeights(recorder.contents, memory, torch.float32).take("a")
    assert torch.equal(found, kept)
    assert found.data_ptr() != kept.data_ptr()


def test_what_is_held_is_what_a_worker_would_load(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path)
    config = read_config(str(model_dir))
    weights = open_weights(config, order_of(model_dir).spec, lambda fraction: None)
    recorder = Recorder(weights, HostSegments(), segment_bytes=1 << 16)
    assert torch.equal(recorder.take("model.norm.weight"), weights.take("model.norm.weight"))
