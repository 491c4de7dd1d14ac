"""Layer profiles: sums of kernels, and how far interpolation is off where it can be checked."""

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from planner.devices import device_sheet
from planner.errors import ProfileError
from planner.latency.interface import Chunk, LatencyModel, Source
from planner.latency.layer_attention import ChunkAttention, MixedFactor, decode_attention
from planner.latency.layer_file import (
    AttentionPoint,
    LayerFiles,
    LayerProfile,
    Owner,
    read_layer_profile,
)
from planner.latency.layer_table import LayerTable
from planner.model_catalog import model_shape
from tests.planner.reference_data import reference_file

OWNER = Owner("RTX4090", "meta-llama/Llama-3.1-8B", 1)
Points = dict[AttentionPoint, float]
Keep = Callable[[AttentionPoint], bool]


def files() -> LayerFiles:
    return LayerFiles.within(reference_file("llmservingsim_dense_us.csv").parent)


def profile() -> LayerProfile:
    return read_layer_profile(files(), OWNER)


def table() -> LayerTable:
    return LayerTable.read(files(), OWNER)


def part(points: Points, keep: Keep) -> Points:
    return {point: seconds for point, seconds in points.items() if keep(point)}


def chunks_alone(points: Points) -> Points:
    return part(points, lambda p: p.batch == 0)


def decodes_alone(points: Points) -> Points:
    return part(points, lambda p: p.num_new == 0)


def test_a_decode_step_is_the_sum_of_its_kernels() -> None:
    found, num_layers = profile(), 32
    at_one = {name: row[0][1] for name, row in found.dense.items()}
    once = at_one["embedding"] + at_one["final_layernorm"]
    layer = sum(at_one.values()) - once + at_one["layernorm"]
    layer += found.attention[AttentionPoint(0, 0, 1, 512)]
    sampled = found.per_sequence["lm_head"][0][1] + found.per_sequence["sampler"][0][1]
    expected = num_layers * layer + once + sampled
    line = table().decode(1, 512)
    assert line.seconds(512) == pytest.approx(expected)
    assert line.source is Source.MEASURED


def test_measured_attention_is_given_back_in_mixed_steps() -> None:
    model, found = table(), profile().attention
    apart = AttentionPoint(512, 1024, 64, 1024)
    grown = AttentionPoint(512, 1024, 64, 2048)
    steps = [model.mixed([Chunk(512, 1024)], 64, 64 * p.context).seconds for p in (apart, grown)]
    assert steps[1] - steps[0] == pytest.approx(32 * (found[grown] - found[apart]))


def test_a_mixed_step_takes_more_than_attention_apart_would() -> None:
    model = table()
    together = model.mixed([Chunk(512)], 32, 32 * 1300).seconds
    rows_s = model.prefill([Chunk(544)]).seconds
    attention_s = model.decode(32, 32 * 1300).seconds(32 * 1300) - model.decode(32, 0).base_s
    assert together > rows_s + attention_s


def left_out_errors(points: Points, group: Callable[[AttentionPoint], int]) -> list[float]:
    """Relative errors of decode attention with one inner group of points left out at a time."""
    errors = []
    for left in sorted({group(p) for p in points})[1:-1]:
        grid = decode_attention(part(points, lambda p: group(p) != left), 1)  # noqa: B023
        for p in part(points, lambda p: group(p) == left):  # noqa: B023
            tokens = p.batch * p.context
            errors.append(abs(grid.line(p.batch, tokens).seconds(tokens) / points[p] - 1))
    return errors


def test_decode_attention_left_out_comes_back_within_two_percent_in_the_median() -> None:
    """Of points twice as far apart as those it really lies between."""
    points = decodes_alone(profile().attention)
    by_batch = left_out_errors(points, lambda p: p.batch)
    by_context = left_out_errors(points, lambda p: p.context)
    assert median(by_batch) < 0.02
    assert median(by_context) < 0.03
    large = part(points, lambda p: p.batch >= 8 and p.context >= 256)
    assert max(left_out_errors(large, lambda p: p.context)) < 0.07


def test_chunk_attention_left_out_comes_back_within_three_percent_in_the_median() -> None:
    points = chunks_alone(profile().attention)
    errors = {}
    for left in sorted({p.num_new for p in points})[1:-1]:
        attention = ChunkAttention(part(points, lambda p: p.num_new != left))  # noqa: B023
        for p in part(points, lambda p: p.num_new == left):  # noqa: B023
            errors[p] = abs(attention.alone_s(p.num_new, p.num_cached) / points[p] - 1)
    assert median(errors.values()) < 0.03
    assert max(error for p, error in errors.items() if p.num_new != 256) < 0.2


def test_mixed_attention_left_out_comes_back_within_two_percent_in_the_median() -> None:
    points = profile().attention
    both = part(points, lambda p: p.num_new > 0 and p.batch > 0)
    chunks, decodes = (
        ChunkAttention(chunks_alone(points)),
        decode_attention(decodes_alone(points), 1),
    )
    errors = []
    for left in (512, 1024):
        factor = MixedFactor(part(both, lambda p: p.num_new != left), chunks, decodes)  # noqa: B023
        for p in part(both, lambda p: p.num_new == left):  # noqa: B023
            tokens, chunk = p.batch * p.context, Chunk(p.num_new, p.num_cached)
            beside_s = decodes.line(p.batch, tokens).seconds(tokens)
            beside_s *= factor([chunk], p.batch, tokens)
            errors.append(abs((chunks([chunk]) + beside_s) / both[p] - 1))
    assert median(errors) < 0.02


def test_between_long_chunks_attention_is_a_parabola() -> None:
    """Halfway between 1,024 and 2,048 a straight line would say 222 us."""
    seconds = ChunkAttention(chunks_alone(profile().attention)).alone_s(1536, 0)
    assert 0.195e-3 < seconds < 0.212e-3


def test_more_tokens_never_take_less_beyond_the_measured_noise() -> None:
    model = table()
    times = [
        model.prefill([Chunk(n)]).seconds for n in (1, 16, 64, 128, 256, 700, 1500, 2048, 4096)
    ]
    assert times == sorted(times)
    assert model.prefill([Chunk(4096)]).source is Source.FITTED


def test_lines_hand_over_without_a_jump() -> None:
    model, tokens = table(), 30.0
    for _ in range(12):
        line = model.decode(30, tokens)
        tokens = line.until_tokens
        if tokens == float("inf"):
            break
        assert line.seconds(tokens) == pytest.approx(model.decode(30, tokens).seconds(tokens))


def test_without_a_link_there_is_no_pull() -> None:
    model: LatencyModel = table()
    with pytest.raises(ProfileError, match="no link"):
        model.transfer(10)


def test_two_ranks_add_their_all_reduces() -> None:
    shape, sheet = model_shape("llama-3.1-8b"), device_sheet("rtx-4090")
    with pytest.raises(ProfileError, match="needs a device sheet"):
        LayerTable(profile(), shape, tp=2)
    alone, two = table(), LayerTable(profile(), shape, tp=2, link=sheet)
    added = two.decode(8, 900).base_s - alone.decode(8, 900).base_s
    assert added == pytest.approx(64 * sheet.all_reduce(8 * 4096 * 2, 2))


def test_an_owner_without_rows_hears_who_has_some() -> None:
    with pytest.raises(ProfileError, match=r"no rows of H100 .*there are RTX4090"):
        read_layer_profile(files(), Owner("H100", "meta-llama/Llama-3.1-8B", 1))


def write(folder: Path, name: str, rows: list[list[str]]) -> None:
    with (folder / f"llmservingsim_{name}_us.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        (["gpu", "model", "tp", "layer", "tokens", "time_us"], "quick", "line 2: 'quick'"),
        (["gpu", "model", "tp", "layer", "tokens", "time_us"], "-1", "line 2: -1 is below zero"),
        (["gpu", "model", "tp", "layer", "rows", "time_us"], "1", "lacks the columns tokens"),
    ],
)
def test_a_broken_file_names_itself_and_the_line(
    tmp_path: Path, header: list[str], value: str, words: str
) -> None:
    write(tmp_path, "dense", [header, ["gpu", "m", "1", "mlp", "1", value]])
    attention = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write(tmp_path, "attention", [["gpu", "model", "tp", *attention], ["gpu", "m", "1", *"01010"]])
    sequences = ["gpu", "model", "tp", "layer", "sequences", "time_us"]
    write(tmp_path, "per_sequence", [sequences, ["gpu", "m", "1", "head", "1", "1"]])
    with pytest.raises(ProfileError, match=words):
        read_layer_profile(LayerFiles.within(tmp_path), Owner("gpu", "m", 1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"llmservingsim_dense_us\.csv: No such file"):
        read_layer_profile(LayerFiles.within(tmp_path), OWNER)
