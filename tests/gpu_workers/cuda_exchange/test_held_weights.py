"""Weights laid out once in memory that is shared: where they lie, and what is found there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_workers.cuda_routes import Gpu
from gpu_workers.cuda_weights import DeviceWeights
from gpu_workers.engine import open_weights
from gpu_workers.held_weights import (
    ALIGNMENT,
    GpuSegments,
    HeldWeights,
    HostSegments,
    Outline,
    Recorder,
    stacked,
)
from gpu_workers.models.config import read_config
from gpu_workers.weight_holder import record
from gpu_workers.weights import Cut, DummyWeights
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_layout import Span
from ipc.kv_shm import PoolUnavailable
from tests.gpu_workers.checkpoints import llama_gqa, opt_pre_norm
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart
from tests.gpu_workers.cuda_exchange.fake_function import OUT_OF_MEMORY
from tests.gpu_workers.cuda_exchange.test_weight_holder import order_of

SHAPES = {"a": (4, 6), "b": (2, 6), "norm": (6,)}


@pytest.mark.parametrize("make", [llama_gqa, opt_pre_norm])
def test_all_weights_lie_in_one_segment_that_they_fill(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """What a model stacks across the end of a segment, each of its workers would copy."""
    recorder = record(order_of(make(tmp_path)), HostSegments())
    last = max(recorder.contents.places, key=lambda place: place.offset)
    end = last.offset + 4 * torch.Size(last.shape).numel()
    assert recorder.contents.segments == (-(-end // ALIGNMENT) * ALIGNMENT,)


@pytest.mark.parametrize("name", ["x.self_attn.q_proj.weight", "x.self_attn.o_proj.weight", "b"])
def test_an_outline_has_the_shapes_of_what_is_stored_on_a_gpu(name: str) -> None:
    shapes = {"x.self_attn.q_proj.weight": (160, 6), "x.self_attn.o_proj.weight": (6, 160)}
    sources = (
        Outline(shapes | SHAPES, torch.float32),
        DummyWeights(shapes | SHAPES, torch.float32),
    )
    outlined, stored = (
        DeviceWeights(source, torch.device(where), head_dim=80, stored=128).take(name)
        for source, where in zip(sources, ("meta", "cpu"), strict=True)
    )
    assert (outlined.shape, outlined.dtype) == (stored.shape, stored.dtype)


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
    recorder = Recorder(DummyWeights(SHAPES, torch.float32), HostSegments(), segment_bytes=4096)
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


def test_weights_that_a_gpu_has_no_room_for_are_told_as_weights() -> None:
    library = FakeCudart()
    segments = GpuSegments(
        DeviceMemory(CudaRuntime(library)), Gpu(0, ("GPU-a",)), torch.device("cpu")
    )
    library.fails["cudaMalloc"] = OUT_OF_MEMORY
    with pytest.raises(PoolUnavailable, match=r"^the weights of 1.00 GiB cannot be had on GPU 0: "):
        segments.make(1 << 30)


def test_what_is_held_is_what_a_worker_would_load(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path)
    config = read_config(str(model_dir))
    weights = open_weights(config, order_of(model_dir).spec, lambda fraction: None)
    recorder = Recorder(weights, HostSegments(), segment_bytes=1 << 16)
    assert torch.equal(recorder.take("model.norm.weight"), weights.take("model.norm.weight"))
