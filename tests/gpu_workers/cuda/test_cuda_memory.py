"""What a worker takes of its GPU's memory is reckoned before it takes it."""

from pathlib import Path

import pytest
import torch

from gpu_workers.cuda_attention import stored_head_dim, workspace_bytes
from gpu_workers.cuda_engine import (
    Claim,
    Gpu,
    explaining,
    open_gpu,
    reckon_pool,
    usable,
    wants_gpu,
)
from gpu_workers.cuda_memory import (
    NCCL_BYTES,
    MemoryNeeds,
    MemoryPlan,
    StepLimits,
    check_free,
    memory_needs,
    pool_bytes,
    weight_bytes,
)
from gpu_workers.cuda_sampler import SAMPLING_BYTES
from gpu_workers.cuda_weights import DeviceWeights
from gpu_workers.errors import ModelError
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.models.registry import held_names, weight_shapes
from gpu_workers.weights import DummyWeights
from ipc.kv_layout import RankLayout, Span
from ipc.vocabulary import DeviceKind, DType, Parallelism
from tests.gpu_workers.checkpoints import CHECKPOINTS, llama_gqa, opt_pre_norm
from tests.gpu_workers.cuda.fake_device import FakeDevice

GIB = 1 << 30
LIMITS = StepLimits(2048, 64)
NEEDS = MemoryNeeds(weights=15 * GIB, activations=GIB, graphs=GIB // 2, workspaces=GIB // 4)


@pytest.fixture(scope="module", params=[*CHECKPOINTS, "llama-80", "opt-80"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp(request.param)
    made = {
        "llama-80": lambda: llama_gqa(path, head_dim=80),
        "opt-80": lambda: opt_pre_norm(path, hidden_size=160),
    }
    return read_config(made.get(request.param, lambda: CHECKPOINTS[request.param](path))())


def test_weights_are_reckoned_to_the_byte(config: ModelConfig) -> None:
    source = DummyWeights(weight_shapes(config), torch.float16)
    stored = stored_head_dim(config.head_dim)
    on_device = DeviceWeights(source, torch.device("cpu"), head_dim=config.head_dim, stored=stored)
    taken = sum(on_device.take(name).nbytes for name in held_names(config, config.whole))
    assert weight_bytes(config, config.whole, DType.FP16) == taken


def test_shards_of_a_stage_have_a_share_each(config: ModelConfig) -> None:
    parallelism = Parallelism(tp=2)
    whole = weight_bytes(config, config.whole, DType.FP16)
    parts = [
        weight_bytes(config, config.shard(parallelism, 0, rank), DType.FP16) for rank in (0, 1)
    ]
    assert parts[0] < whole
    assert sum(parts) >= whole  # norms and biases are on both


def test_heads_are_as_wide_as_attention_is_compiled_for() -> None:
    widths = {width: stored_head_dim(width) for width in (64, 80, 96, 128, 160, 256)}
    assert widths == {64: 64, 80: 128, 96: 128, 128: 128, 160: 256, 256: 256}
    with pytest.raises(ModelError, match="a head width of 320 is above 256"):
        stored_head_dim(320)


def test_padded_heads_hold_zeros_that_meet_zeros(tmp_path: Path) -> None:
    config = read_config(llama_gqa(tmp_path, head_dim=80, attention_bias=True))
    source = DummyWeights(weight_shapes(config), torch.float32)
    weights = DeviceWeights(source, torch.device("cpu"), head_dim=80, stored=128)
    prefix = "model.layers.0.self_attn"
    q = weights.take(f"{prefix}.q_proj.weight").view(config.num_heads, 128, -1)
    o = weights.take(f"{prefix}.o_proj.weight").view(-1, config.num_heads, 128)
    assert torch.equal(q[:, :80].reshape(-1, q.shape[2]), source.take(f"{prefix}.q_proj.weight"))
    assert torch.equal(o[:, :, :80].flatten(1), source.take(f"{prefix}.o_proj.weight"))
    assert not q[:, 80:].any()
    assert not o[:, :, 80:].any()
    bias = weights.take(f"{prefix}.k_proj.bias").view(config.num_kv_heads, 128)
    assert not bias[:, 80:].any()
    assert weights.take(f"{prefix}.o_proj.bias").shape == (config.hidden_size,)


def test_a_larger_batch_takes_more_for_graphs_and_logits(config: ModelConfig) -> None:
    small, large = (
        memory_needs(config, config.whole, DType.BF16, StepLimits(2048, batch), has_graphs=True)
        for batch in (8, 256)
    )
    assert small.graphs < large.graphs
    assert small.activations < large.activations
    assert small.weights == large.weights


def test_the_rank_that_draws_keeps_the_logits_of_all_ranks(tmp_path: Path) -> None:
    config = read_config(llama_gqa(tmp_path, vocab_size=4096))
    drawer, other = (
        memory_needs(
            config, config.shard(Parallelism(tp=2), 0, rank), DType.BF16, LIMITS, has_graphs=True
        )
        for rank in (0, 1)
    )
    gathered = 2 * 64 * 4096 * 2  # the parts, and in order; bytes of 64 rows
    assert drawer.activations - other.activations == gathered + 64 * 4096 * SAMPLING_BYTES
    assert drawer.graphs - other.graphs == gathered + 64 * 4096 * 2
    assert drawer.overhead == other.overhead > NEEDS.overhead  # NCCL's buffers


def test_a_large_batch_of_many_heads_needs_larger_workspaces(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 64, "num_key_value_heads": 64}
    config = read_config(llama_gqa(tmp_path, **shape, head_dim=128, num_hidden_layers=1))
    small, large = (
        memory_needs(config, config.whole, DType.BF16, StepLimits(64, rows), has_graphs=True)
        for rows in (64, 512)
    )
    assert large.workspaces - small.workspaces > workspace_bytes(64, 64, 128, graph_rows=512)


def test_the_pool_is_what_a_share_of_the_memory_leaves() -> None:
    assert pool_bytes(NEEDS, 80 * GIB, 0.5) == 40 * GIB - NEEDS.total
    with pytest.raises(ModelError) as refused:
        pool_bytes(NEEDS, 80 * GIB, 0.2)
    assert "0.2 of the GPU's 80.00 GiB leave nothing" in str(refused.value)
    assert "weights 15.00 GiB" in str(refused.value)


def test_what_does_not_fit_says_what_takes_how_much() -> None:
    check_free(NEEDS, 20 * GIB, free_bytes=70 * GIB, total_bytes=80 * GIB)
    with pytest.raises(ModelError) as refused:
        check_free(NEEDS, 20 * GIB, free_bytes=30 * GIB, total_bytes=80 * GIB)
    for part in (
        "30.00 GiB free of 80.00 GiB",
        "37.75 GiB are needed",
        "weights 15.00 GiB",
        "activations of the largest step 1.00 GiB",
        "decode graphs 0.50 GiB",
        "KV cache 20.00 GiB",
    ):
        assert part in str(refused.value)


def test_memory_that_runs_out_after_all_is_explained() -> None:
    plan = MemoryPlan(NEEDS, 20 * GIB, 80 * GIB)
    explained = pytest.raises(ModelError, match=r"does not do for weights 15.00 GiB.*20.00 GiB")
    with explained, explaining(plan):
        raise torch.OutOfMemoryError("tried to allocate")


def test_ranks_of_an_instance_reckon_alike_though_they_hold_unequal_parts(tmp_path: Path) -> None:
    config = read_config(llama_gqa(tmp_path, vocab_size=4096))
    parallelism = Parallelism(pp=2)
    gpu = Gpu(FakeDevice(), None, LIMITS)
    plans = [
        reckon_pool(
            gpu,
            config,
            config.shard(parallelism, stage, 0),
            DType.BF16,
            Claim(kv_bytes=1, utilization=0.5),
        )
        for stage in (0, 1)
    ]
    assert plans[0].needs != plans[1].needs
    assert plans[0].kv_bytes == plans[1].kv_bytes


def test_without_a_share_the_pool_is_as_large_as_configured(tmp_path: Path) -> None:
    config = read_config(llama_gqa(tmp_path))
    gpu = Gpu(FakeDevice(), None, LIMITS)
    plan = reckon_pool(gpu, config, config.whole, DType.BF16, Claim(kv_bytes=3 * GIB))
    assert plan.kv_bytes == 3 * GIB


@pytest.mark.parametrize("utilization", [None, 0.5])
def test_ranks_that_share_a_gpu_reckon_without_graphs_and_without_nccl(
    tmp_path: Path, utilization: float | None
) -> None:
    """They have neither; it once kept gigabytes from their pools."""
    config = read_config(llama_gqa(tmp_path))
    gpu = Gpu(FakeDevice(), None, LIMITS)
    shard = config.shard(Parallelism(tp=2), 0, 0)  # which needs the most
    apart, shared = (
        reckon_pool(
            gpu,
            config,
            shard,
            DType.BF16,
            Claim(kv_bytes=GIB, utilization=utilization, has_graphs=has_graphs),
        )
        for has_graphs in (True, False)
    )
    assert shared.needs.graphs == 0 < apart.needs.graphs
    assert apart.needs.overhead - shared.needs.overhead == NCCL_BYTES
    more = shared.kv_bytes - apart.kv_bytes
    assert more == (0 if utilization is None else apart.needs.total - shared.needs.total)


def test_the_last_block_of_a_pool_is_not_handed_out() -> None:
    layout = RankLayout(Span(0, 1), Span(0, 1), 8, 16, 64, DType.BF16)
    assert usable(layout).num_blocks == 7
    with pytest.raises(ModelError, match="is one block, which is for padding"):
        usable(RankLayout(Span(0, 1), Span(0, 1), 1, 16, 64, DType.BF16))


def test_where_there_is_no_gpu_auto_is_the_cpu_and_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    kinds = (DeviceKind.AUTO, DeviceKind.CPU, DeviceKind.CUDA)
    assert [wants_gpu(kind) for kind in kinds] == [False, False, True]
    with pytest.raises(ModelError, match="there is no GPU 3: CUDA sees 0 here"):
        open_gpu(3, DType.BF16, LIMITS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert wants_gpu(DeviceKind.AUTO)


def test_single_precision_is_for_the_cpu() -> None:
    with pytest.raises(ModelError, match="bfloat16 or float16, not float32"):
        open_gpu(0, DType.FP32, LIMITS)
