"""The roofline and speculative decoding: bounds, relations, and published levels."""

from math import inf

import pytest

from ipc.vocabulary import Parallelism
from planner.devices import device_sheet, device_sheets, on_curve
from planner.errors import InfeasibleShape
from planner.latency.fitted import FittedLatency
from planner.latency.interface import Chunk, LatencyModel, Source
from planner.latency.published import published_latency
from planner.latency.pull import pull_over
from planner.latency.roofline import RooflineLatency
from planner.latency.speculative import Speculative
from planner.memory import MemoryRules, kv_capacity
from planner.model_catalog import model_shape
from tests.planner.reference_data import reference_rows


def roofline(name: str, device: str, tp: int = 1, pp: int = 1, **bits: int) -> RooflineLatency:
    shape = model_shape(name)
    if bits:
        shape = shape.quantised(**{"weight_bits": 16, **bits})
    return RooflineLatency(shape, device_sheet(device), Parallelism(tp, pp))


def decode_ms(model: LatencyModel, batch: int, context: int) -> float:
    return 1000 * model.decode(batch, batch * context).seconds(batch * context)


def prefill_ms(model: LatencyModel, *lengths: int) -> float:
    return 1000 * model.prefill([Chunk(length) for length in lengths]).seconds


def test_a_step_of_70b_in_fp8_takes_as_long_as_reading_its_weights() -> None:
    """70 GB at 3.66 TB/s are 19.1 ms; InferenceX measured 20.1 ms per token at concurrency 4."""
    model = roofline("llama-3.1-70b", "h200", weight_bits=8, compute_bits=8, kv_bits=8)
    assert 19.1 <= decode_ms(model, 1, 16) < 20.3
    assert decode_ms(model, 4, 1536) == pytest.approx(20.1, rel=0.05)


def test_70b_in_fp8_over_eight_devices_is_near_what_was_measured() -> None:
    """InferenceX: 6.3 and 7.7 ms at concurrency 4 and 16, with an engine around the kernels."""
    model = roofline("llama-3.1-70b", "h200", 8, weight_bits=8, compute_bits=8, kv_bits=8)
    assert 0.6 * 6.3 < decode_ms(model, 4, 1536) < 6.3
    assert 0.6 * 7.7 < decode_ms(model, 16, 1536) < 7.7


def test_splitwise_measured_more_than_the_roofline_everywhere() -> None:
    """An older engine with launches in between: its times are upper bounds."""
    devices = {"h100-80gb": "h100", "a100-80gb": "a100"}
    rows = reference_rows("splitwise_dgx_latency_ms.csv")
    num_checked = 0
    for row in rows:
        if row["model"] != "llama2-70b" or row["hardware"] not in devices:
            continue
        tp, batch = int(row["tensor_parallel"]), int(row["batch_size"])
        prompt, output = int(row["prompt_size"]), int(row["token_size"])
        sheet, shape = device_sheet(devices[row["hardware"]]), model_shape("llama-2-70b")
        rules = MemoryRules(utilisation=0.9)  # that engine's default
        room = kv_capacity(shape, sheet, Parallelism(tp), rules).num_tokens
        if batch * (prompt + output) > room:
            continue  # it ran in several parts, and one of them was timed
        model = RooflineLatency(shape, sheet, Parallelism(tp))
        assert prefill_ms(model, *[prompt] * batch) < float(row["prompt_ms_median"]), row
        context = prompt + output // 2
        assert decode_ms(model, batch, context) < float(row["token_ms_median"]), row
        num_checked += 1
    assert num_checked > 90


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_opt_13b_on_an_a100_lies_below_the_published_fit_and_not_far(tp: int) -> None:
    bound = roofline("opt-13b", "a100", tp)
    fit = published_latency("distserve", "opt-13b", Parallelism(tp), raw=True)
    for length in (512, 1024, 2048):
        assert 0.6 * prefill_ms(fit, length) < prefill_ms(bound, length) < prefill_ms(fit, length)
    assert 0.5 * decode_ms(fit, 32, 900) < decode_ms(bound, 32, 900) < decode_ms(fit, 32, 900)


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "rtx-4090", "cpu-core"])
def test_more_tokens_never_take_less(device: str) -> None:
    model = roofline("llama-3-8b", device)
    prefills = [prefill_ms(model, length) for length in range(1, 20_000, 37)]
    assert prefills == sorted(prefills)
    decodes = [decode_ms(model, batch, 300) for batch in range(1, 300)]
    assert decodes == sorted(decodes)


def test_a_decode_line_ends_where_reading_keys_outlasts_the_shortest_kernel() -> None:
    model = roofline("llama-3-8b", "h100")
    first = model.decode(1, 10)
    assert first.per_token_s == 0.0
    then = model.decode(1, first.until_tokens)
    assert then.until_tokens == inf
    assert then.seconds(first.until_tokens) == pytest.approx(first.seconds(first.until_tokens))
    assert then.per_token_s * 3.012e12 == pytest.approx(131_072)
    assert then.source is Source.ROOFLINE


def test_few_kv_heads_are_not_split_further_than_one_each() -> None:
    eight, sixteen = (
        RooflineLatency(model_shape("qwen3-32b"), device_sheet("h100"), Parallelism(tp))
        for tp in (8, 16)
    )
    slopes = [model.decode(64, 1e6).per_token_s for model in (eight, sixteen)]
    assert slopes[0] == pytest.approx(slopes[1])


def test_four_bit_weights_speed_decode_up_and_prefill_not() -> None:
    whole = roofline("llama-3-70b", "h100", 4)
    small = roofline("llama-3-70b", "h100", 4, weight_bits=4)
    assert decode_ms(small, 1, 100) < 0.45 * decode_ms(whole, 1, 100)
    assert prefill_ms(small, 4096) == pytest.approx(prefill_ms(whole, 4096), rel=0.01)


def test_an_eight_bit_cache_halves_what_context_costs() -> None:
    whole = roofline("llama-3-8b", "h100").decode(64, 1e6)
    half = roofline("llama-3-8b", "h100", kv_bits=8).decode(64, 1e6)
    assert half.per_token_s == pytest.approx(whole.per_token_s / 2)


def test_a_mixture_reads_the_experts_that_its_tokens_ask_for() -> None:
    """One token of Qwen3-30B-A3B reads 3 of 30 billion parameters; a large batch reads them all."""
    shape, sheet = model_shape("qwen3-30b-a3b"), device_sheet("cpu")
    model = RooflineLatency(shape, sheet)
    alone_s = decode_ms(model, 1, 1) / 1000
    active = alone_s * sheet.bytes_per_s / 2
    assert 2.5e9 < active < 3.4e9
    assert decode_ms(model, 64, 1) / 1000 > 0.9 * 2 * shape.matrix_params / sheet.bytes_per_s


def test_a_pipeline_divides_the_step_and_adds_a_send() -> None:
    whole, halves = roofline("opt-66b", "a100", 4), roofline("opt-66b", "a100", 4, 2)
    send_ms = 1000 * (8e-6 + 512 * 9216 * 2 / 4 / 227e9)
    assert prefill_ms(halves, 512) == pytest.approx(prefill_ms(whole, 512) / 2 + send_ms, rel=1e-3)
    assert (halves.num_stages, halves.num_devices) == (2, 8)


def test_a_mixed_step_reads_the_weights_once() -> None:
    model = roofline("llama-3-8b", "h100")
    mixed_s = model.mixed([Chunk(64)], 32, 32_000).seconds
    apart_s = model.prefill([Chunk(64)]).seconds + model.decode(32, 32_000).seconds(32_000)
    assert mixed_s < 0.7 * apart_s
    assert model.mixed([], 32, 32_000).seconds == model.decode(32, 32_000).seconds(32_000)
    assert model.mixed([Chunk(64)], 0, 0).seconds == model.prefill([Chunk(64)]).seconds


def test_this_engine_on_one_core_is_where_it_was_measured() -> None:
    """README: 132 to 155, 581 to 593, 2,974 to 3,035 ms; the sheet knows the middle one alone."""
    model = roofline("smollm2-135m", "cpu")
    for length, measured_ms in ((128, 155), (512, 593), (2048, 3035)):
        assert prefill_ms(model, length) == pytest.approx(measured_ms, rel=0.1)


def test_a_shape_that_cannot_be_has_no_roofline() -> None:
    with pytest.raises(InfeasibleShape):
        roofline("opt-13b", "a100", 3)


@pytest.mark.parametrize(
    ("name", "across", "milliseconds"),
    [("opt-66b", False, 10), ("opt-66b", True, 310), ("llama-3-70b", True, 43)],
)
def test_a_pull_of_1000_tokens_takes_what_the_link_takes(
    name: str, across: bool, milliseconds: float
) -> None:
    sheet = device_sheet("a100")
    pull = pull_over(sheet, model_shape(name), Parallelism(), across_nodes=across)
    assert 1000 * pull.seconds(1000) == pytest.approx(milliseconds, rel=0.05)


def test_ranks_pull_their_parts_side_by_side() -> None:
    sheet, shape = device_sheet("a100"), model_shape("opt-66b")
    one, eight = (pull_over(sheet, shape, p) for p in (Parallelism(), Parallelism(4, 2)))
    assert eight.bytes_per_token == one.bytes_per_token / 8


def test_all_reduces_grow_with_bytes_and_devices() -> None:
    for sheet in device_sheets().values():
        assert sheet.all_reduce(1 << 20, 1) == 0.0
        times = [sheet.all_reduce(1 << 20, number) for number in (2, 4, 8)]
        assert times == sorted(times)
        sizes = [sheet.all_reduce(1 << bits, 4) for bits in range(10, 31)]
        assert sizes == sorted(sizes)


def test_every_sheet_names_its_sources() -> None:
    assert len(device_sheets()) == 5
    assert all(sheet.sources for sheet in device_sheets().values())
    assert on_curve(((1.0, 10.0), (3.0, 30.0)), 2.0) == 20.0


def test_speculation_adds_drafts_and_a_wider_check() -> None:
    target, draft = roofline("llama-3-70b", "h100", 4), roofline("llama-3-8b", "h100", 4)
    model = Speculative(target, draft, num_drafted=3)
    step_s = model.decode(8, 8000).seconds(8000)
    check_s = target.decode(32, 8000).seconds(8000)
    drafts_s = sum(draft.decode(8, 8000 + 8 * i).seconds(8000 + 8 * i) for i in range(3))
    assert step_s == pytest.approx(check_s + drafts_s)
    assert model.decode(8, 8000).source is Source.ROOFLINE


def test_speculation_prefills_and_pulls_both_models() -> None:
    target: FittedLatency = published_latency("distserve", "opt-66b", Parallelism(4))
    draft = roofline("opt-1.3b", "a100", 4)
    model: LatencyModel = Speculative(target, draft, num_drafted=2)
    both = target.prefill([Chunk(512)]).seconds + draft.prefill([Chunk(512)]).seconds
    assert model.prefill([Chunk(512)]).seconds == pytest.approx(both)
    assert model.prefill([Chunk(512)]).source is Source.ROOFLINE
    assert model.transfer(100).seconds > target.transfer(100).seconds
    assert model.mixed([Chunk(64)], 8, 900).seconds > target.mixed([Chunk(64)], 8, 900).seconds
