"""What the library's kernels cannot do is not asked of them: torch does it, or nobody need."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_workers.cuda_attention import (
    GRAPH_PLAN_BYTES,
    WORKSPACE_BYTES,
    AttentionShape,
    PagedAttention,
    workspace_bytes,
)
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_step import HostStep, PageTable, padding_only
from gpu_workers.errors import ModelError
from gpu_workers.kernels import Geometry
from gpu_workers.scratch import Scratch
from tests.gpu_workers.checkpoints import NUM_TOKEN_IDS, llama_gqa
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda.rig import CudaDriver, on_cpu
from tests.gpu_workers.driving import greedy

PROMPT = list(b"Under the greenwood tree who loves to lie with me")
PAGE = 16


def kernels(heads: int, kv_heads: int, head_dim: int, library: FakeFlashInfer) -> CudaKernels:
    pool = torch.zeros(4, kv_heads, 1, 2, PAGE, head_dim, dtype=torch.float16)
    return CudaKernels(pool, Geometry(heads, head_dim**-0.5), library.device, library)


@pytest.fixture
def library() -> FakeFlashInfer:
    return FakeFlashInfer(FakeDevice())


def one_prompt(num_new: int, num_pages: int) -> HostStep:
    """A chunk at the end of a long sequence, all of whose pages are the first block."""
    wide = np.zeros(num_new, dtype=np.int64)
    pages = PageTable(
        np.array([0, num_pages], dtype=np.int32),
        np.zeros(num_pages, dtype=np.int32),
        np.array([PAGE], dtype=np.int32),
    )
    starts = np.array([0, num_new], dtype=np.int32)
    owners = np.zeros(num_new, dtype=np.int32)
    none = np.zeros(0, dtype=np.int64)
    return HostStep(wide, wide, wide, wide, owners, starts, pages, none, none, None, 0)


LARGE_BATCHES = [(32, 8, 128, 512), (64, 8, 128, 256), (40, 40, 128, 512), (16, 16, 256, 512)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rows"), LARGE_BATCHES)
def test_large_graphs_have_room_for_partial_results_beyond_what_is_recommended(
    heads: int, kv_heads: int, head_dim: int, rows: int, library: FakeFlashInfer
) -> None:
    """128 MiB end in a buffer overflow at the first plan of these."""
    made = kernels(heads, kv_heads, head_dim, library)
    memory = made.fixed_memory(rows, rows)
    assert len(memory.workspace) > WORKSPACE_BYTES
    attention = made.fixed_attention(memory, rows)
    made.place_fixed(padding_only(rows, 3), memory, attention, Scratch(torch.float16))


def test_graphs_of_small_batches_share_the_room_of_eager_steps(library: FakeFlashInfer) -> None:
    made = kernels(32, 8, 128, library)
    small, smaller = made.fixed_memory(64, 64), made.fixed_memory(8, 8)
    assert small.workspace is smaller.workspace
    assert len(small.workspace) == WORKSPACE_BYTES


@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (96, 8), (32, 2)])
def test_a_chunk_of_a_long_prompt_has_room_where_many_heads_share_their_keys(
    heads: int, kv_heads: int, library: FakeFlashInfer
) -> None:
    shape = AttentionShape(heads, kv_heads, 128, PAGE, 128**-0.5, torch.float16)
    workspace = torch.zeros(workspace_bytes(heads, kv_heads, 128), dtype=torch.uint8)
    attention = PagedAttention(library, library.device, shape, workspace)
    for num_new in (17, 128, 2048):
        attention.plan(one_prompt(num_new, 8192), torch.zeros(8192, dtype=torch.int32))


def test_a_graphs_plan_takes_little_memory(library: FakeFlashInfer) -> None:
    made = kernels(4, 2, 64, library)
    made.fixed_attention(made.fixed_memory(8, 64), 8)
    assert library.wrappers[-1].plan_room == GRAPH_PLAN_BYTES


def test_keys_of_more_heads_than_one_block_of_threads_takes_are_written_by_torch(
    library: FakeFlashInfer,
) -> None:
    kernels(136, 136, 64, library).warm_up()
    assert "append_paged_kv_cache" not in library.calls
    kernels(128, 128, 64, library).warm_up()
    assert library.calls["append_paged_kv_cache"] == 2  # of a decode row and of a prompt


def test_kernels_are_run_for_a_prompt_too_before_anybody_waits(library: FakeFlashInfer) -> None:
    table = torch.zeros(40, 2, 32)  # no position is beyond it
    pool = torch.zeros(4, 2, 1, 2, PAGE, 64, dtype=torch.float16)
    CudaKernels(pool, Geometry(4, 0.125, table), library.device, library).warm_up()
    for name in ("Decode", "Prefill"):
        assert library.calls[f"Batch{name}WithPagedKVCacheWrapper.run"] == 1


def test_a_gate_of_no_whole_vectors_is_torchs(tmp_path: Path) -> None:
    """FlashInfer 0.6 loads 16 bytes from an address that is no multiple of them."""
    model_dir = llama_gqa(tmp_path, intermediate_size=100)
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
    expected = on_cpu(model_dir, num_token_ids=NUM_TOKEN_IDS).generate(PROMPT, 4)
    warmed_up = driver.flashinfer.calls["silu_and_mul"]
    assert driver.generate(PROMPT, 4) == expected
    assert driver.flashinfer.calls["silu_and_mul"] == warmed_up


def test_a_chunk_amid_its_prompt_asks_nothing_on_no_rows(tmp_path: Path) -> None:
    """Nothing of it goes through the head: a launch over nothing is an error to CUDA."""
    driver = CudaDriver(llama_gqa(tmp_path), num_token_ids=NUM_TOKEN_IDS)
    sequence = driver.add(PROMPT, greedy())
    gated = driver.flashinfer.calls["silu_and_mul"]
    assert driver.step((sequence, 16, False)) == {}
    layers = driver.config.num_layers
    assert driver.flashinfer.calls["silu_and_mul"] == gated + layers - 1
    assert len(driver.step((sequence, len(PROMPT) - 16, True))) == 1


class NoCompiler(FakeFlashInfer):
    """A library whose modules cannot be built."""

    def append_paged_kv_cache(self, *given: Any, **named: Any) -> None:
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda'")


def test_kernels_that_cannot_be_compiled_are_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"kernels do not run here: Could not find nvcc"):
        kernels(4, 2, 64, NoCompiler(FakeDevice())).warm_up()


class Full(FakeFlashInfer):
    def append_paged_kv_cache(self, *given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")


def test_memory_that_runs_out_then_is_not_taken_for_a_kernels_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        kernels(4, 2, 64, Full(FakeDevice())).warm_up()
