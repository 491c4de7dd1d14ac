"""Compiled kernels compute what the torch kernels do, for every instruction set of this machine.

Both are compared with the operation in fp64 or fp32 on the same rounded inputs; how far rounding
may go, `attention_scene` says.
"""

from typing import cast

import pytest
import torch
import torch.nn.functional as F

from gpu_workers import native_kernels, native_linear
from gpu_workers.kernels import Geometry, Norm
from gpu_workers.models.config import Activation
from gpu_workers.native_build import ISAS, PORTABLE, BuildError, Isa, cpu_flags, load
from gpu_workers.native_calls import Calls, Outputs
from gpu_workers.native_kernels import NativeKernels, can_compute
from tests.gpu_workers.attention_scene import BF16, FP32, Scene, assert_close, make_batch, random

TYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
HERE = [isa for isa in (*ISAS, PORTABLE) if isa.needs <= cpu_flags()]


@pytest.fixture(autouse=True)
def _like_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compute thread and no matrix unit, whatever there is here; the same numbers each time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for module in (native_kernels, native_linear):
        monkeypatch.setattr(module, "has_matrix_unit", lambda: False)
    torch.manual_seed(7)


@pytest.fixture(scope="module", params=HERE, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    isa: Isa = request.param
    try:
        load(isa)
    except BuildError as error:
        pytest.skip(str(error))
    return isa


def empty_kernels(isa: Isa, dtype: torch.dtype) -> NativeKernels:
    """Kernels for operations that do not look at the pool."""
    return NativeKernels(load(isa), torch.zeros(1, 1, 1, 2, 4, 64, dtype=dtype), Geometry(1, 1.0))


# ---- element-wise ---------------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("width", [576, 96, 37, 5])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(isa: Isa, dtype: torch.dtype, width: int, has_residual: bool) -> None:
    kernels = empty_kernels(isa, dtype)
    norm = Norm(random(width, dtype=dtype), 1e-5)
    x, residual = random(9, width, dtype=dtype), random(9, width, dtype=dtype)
    total = x + residual if has_residual else x
    expected = F.rms_norm(total.double(), (width,), norm.weight.double(), norm.eps)
    if has_residual:
        found = kernels.add_rms_norm(x, residual, norm)
        assert torch.equal(residual, total)
    else:
        found = kernels.rms_norm(x, norm)
    assert_close(found, expected)


@TYPES
@pytest.mark.parametrize("width", [128, 37, 5])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_layer_norm(isa: Isa, dtype: torch.dtype, width: int, offset: float) -> None:
    kernels = empty_kernels(isa, dtype)
    norm = Norm(random(width, dtype=dtype), 1e-5, random(width, dtype=dtype))
    x, residual = random(9, width, dtype=dtype) + offset, random(9, width, dtype=dtype)
    weights = norm.weight.double(), cast(torch.Tensor, norm.bias).double(), norm.eps
    expected = F.layer_norm(x.double(), (width,), *weights)
    assert_close(kernels.layer_norm(x, norm), expected)
    total = x + residual
    expected = F.layer_norm(total.double(), (width,), *weights)
    assert_close(kernels.add_layer_norm(x, residual, norm), expected)
    assert torch.equal(residual, total)


def test_norms_take_rows_that_are_not_contiguous(isa: Isa) -> None:
    kernels = empty_kernels(isa, BF16)
    norm = Norm(random(96, dtype=BF16), 1e-5)
    wide = random(6, 200, dtype=BF16)
    x = wide[::2, 4:100]
    assert_close(
        kernels.rms_norm(x, norm), F.rms_norm(x.double(), (96,), norm.weight.double(), 1e-5)
    )


@TYPES
@pytest.mark.parametrize("width", [1536, 37])
def test_silu_mul(isa: Isa, dtype: torch.dtype, width: int) -> None:
    kernels = empty_kernels(isa, dtype)
    gate_up = random(5, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(kernels.silu_mul(gate_up), F.silu(gate) * up)


def test_silu_of_extreme_gates_is_the_gate_or_nothing(isa: Isa) -> None:
    gate = torch.tensor([-1e4, -1000.0, -88.0, 88.0, 1000.0, 1e30])
    found = empty_kernels(isa, FP32).silu_mul(torch.cat((gate, torch.ones(6)))[None])
    assert torch.allclose(found[0], torch.tensor([0.0, 0.0, 0.0, 88.0, 1000.0, 1e30]), atol=1e-30)


def test_rounding_to_bf16_is_torchs(isa: Isa) -> None:
    """Ties to even, subnormals aside; an infinity and a NaN stay what they are."""
    odd = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -3.4e38, torch.inf, torch.nan, 0.1])
    ones = torch.ones_like(odd)
    kernels = empty_kernels(isa, BF16)
    # Adding bf16 numbers is exact in fp32, so that only the last rounding shows.
    high, low = odd.to(BF16), (odd - odd.to(BF16).float()).nan_to_num().to(BF16)
    residual = low[None].clone()
    kernels.add_rms_norm(high[None], residual, Norm(ones.to(BF16), 1e-5))
    expected = (high.float() + low.float()).to(BF16)
    assert torch.equal(residual[0].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert bool(residual[0, 5].isnan())


# ---- linear ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(576, 960), (64, 64), (34, 130), (2, 1), (4200, 64)]
)
def test_linear_with_any_number_of_rows(isa: Isa, inputs: int, outputs: int) -> None:
    kernels = empty_kernels(isa, BF16)
    weight, bias = random(outputs, inputs, dtype=BF16), random(outputs, dtype=BF16)
    plain = kernels.pack(weight)
    biased = kernels.pack(weight, bias, activation=Activation.RELU)
    for rows in (1, 2, 5, 6, 7, 8, 13, 48, 49, 110):
        x = random(rows, inputs, dtype=BF16)
        expected = x.double() @ weight.double().T
        assert_close(plain(x), expected)
        assert_close(biased(x), (expected + bias.double()).relu())
    assert plain.out_features == outputs


def test_a_rows_result_does_not_depend_on_the_rows_beside_it(isa: Isa) -> None:
    linear = empty_kernels(isa, BF16).pack(random(100, 300, dtype=BF16))
    x = random(64, 300, dtype=BF16)
    alone = torch.cat([linear(row[None]).clone() for row in x])
    assert torch.equal(linear(x), alone)
    assert torch.equal(linear(x[3:20]), alone[3:20])


def test_linear_with_gelu_and_strided_rows(isa: Isa) -> None:
    weight = random(70, 32, dtype=BF16)
    linear = empty_kernels(isa, BF16).pack(weight, activation=Activation.GELU)
    x = random(8, 64, dtype=BF16)[::2, 16:48]
    assert_close(linear(x), F.gelu(x.double() @ weight.double().T))


@TYPES
def test_odd_inputs_and_fp32_weights_are_left_to_torch(isa: Isa, dtype: torch.dtype) -> None:
    weight, bias = random(70, 33, dtype=dtype), random(70, dtype=dtype)
    x = random(3, 33, dtype=dtype)
    expected = x.double() @ weight.double().T + bias.double()
    assert_close(empty_kernels(isa, dtype).pack(weight, bias)(x), expected)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (576, 960), (40, 70)])
def test_onednn_shares_its_packed_weight_where_that_helps(
    isa: Isa, monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int
) -> None:
    """As on a CPU with AMX: few rows by our kernel, more by oneDNN, out of one copy."""
    monkeypatch.setattr(native_linear, "has_matrix_unit", lambda: True)
    kernels = empty_kernels(isa, BF16)
    weight, bias = random(outputs, inputs, dtype=BF16), random(outputs, dtype=BF16)
    for activation, function in ((None, lambda y: y), (Activation.RELU, torch.relu)):
        linear = kernels.pack(weight, bias, activation=activation)
        for rows in (1, native_linear.MAX_ROWS_BESIDE_AMX, native_linear.MAX_ROWS_BESIDE_AMX + 1):
            x = random(rows, inputs, dtype=BF16)
            assert_close(linear(x), function(x.double() @ weight.double().T + bias.double()))


def test_several_threads_multiply_by_onednn(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    weight, x = random(128, 64, dtype=BF16), random(3, 64, dtype=BF16)
    assert_close(empty_kernels(isa, BF16).pack(weight)(x), x.double() @ weight.double().T)


# ---- RoPE, pages, attention -----------------------------------------------------------------

MIXED = [(0, 1), (15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (200, 1), (0, 70), (0, 16), (33, 100)]
MIXED += [(64, 5), (63, 2), (5, 130)]


@TYPES
@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(4, 64), (16, 64), (16, 80), (32, 80), (32, 128), (4, 128)]
)
def test_prompts_chunks_and_decodes_in_one_batch(
    isa: Isa, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    Scene(MIXED, dtype, block_size=block_size, head_dim=head_dim).check(isa)


@TYPES
@pytest.mark.parametrize("group", range(1, 9))
def test_any_size_of_a_group(isa: Isa, dtype: torch.dtype, group: int) -> None:
    rows = [(100, 1), (127, 1), (0, 60), (20, 50)]
    Scene(rows, dtype, heads=(3 * group, 3), head_dim=64).check(isa)


@TYPES
def test_one_kv_head_for_many_heads_and_wide_heads(isa: Isa, dtype: torch.dtype) -> None:
    rows = [(70, 1), (0, 40), (50, 3)]
    Scene(rows, dtype, heads=(48, 1), head_dim=32).check(isa)
    Scene(rows, dtype, heads=(2, 1), head_dim=256).check(isa)


@TYPES
def test_learned_positions_leave_q_and_k_as_they_are(isa: Isa, dtype: torch.dtype) -> None:
    Scene(MIXED, dtype, heads=(4, 4), has_rope=False).check(isa)


def test_scores_far_apart_do_not_overflow(isa: Isa) -> None:
    scene = Scene([(90, 1), (0, 100), (30, 80)], BF16, has_rope=False)
    scene.qkv *= 40
    scene.past *= 40
    scene.check(isa)


def test_a_token_attends_alike_as_prompt_as_chunk_and_alone(isa: Isa) -> None:
    """Bit for bit: what shares a step with a token does not change its numbers."""
    whole = Scene([(0, 150)], BF16)
    pool = whole.past.clone()
    kernels = NativeKernels(load(isa), pool, whole.geometry)
    expected = whole.run(kernels, whole.qkv.clone())
    table, block_size = whole.batch.block_table, pool.shape[4]
    for computed, num_new in ((100, 50), (149, 1), (64, 86), (140, 2)):
        part = make_batch([(computed, num_new)], table, block_size)
        qkv = whole.qkv[computed : computed + num_new].clone()
        kernels.prepare(part)
        kernels.append(1, qkv)
        assert torch.equal(kernels.attention(1, qkv), expected[computed : computed + num_new])


def test_fresh_prompts_go_through_the_matrix_unit_where_there_is_one(
    isa: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_kernels, "has_matrix_unit", lambda: True)
    Scene(MIXED, BF16).check(isa)
    Scene(MIXED, BF16, heads=(4, 4), head_dim=80).check(isa)


def test_what_the_kernels_do_not_know_is_found_out_before() -> None:
    def known(dtype: torch.dtype, head_dim: int, num_heads: int) -> bool:
        return can_compute(torch.zeros(1, 2, 1, 2, 4, head_dim, dtype=dtype), num_heads)

    assert known(BF16, 64, 6)
    assert known(FP32, 256, 96)
    assert not known(torch.float16, 64, 6)
    assert not known(BF16, 72, 6)
    assert not known(BF16, 272, 6)
    assert not known(BF16, 64, 98)


def test_an_outgrown_buffer_is_not_kept() -> None:
    outputs = Outputs(BF16)
    small = outputs.take("x", 4, 8)
    assert outputs.take("x", 4, 8)[0] is small[0]
    large = outputs.take("x", 400, 8)
    assert outputs.take("x", 4, 8)[1] == large[1] != small[1]


def test_touching_a_pool_leaves_it_as_it_is(isa: Isa) -> None:
    pool = random(3, 5000, dtype=FP32)
    before = pool.clone()
    Calls(load(isa)).touch_pages(pool.data_ptr(), pool.numel() * 4, 4096)
    assert torch.equal(pool, before)
