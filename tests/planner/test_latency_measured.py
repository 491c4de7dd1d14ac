"""Measured latency: exact at its points, straight between them, and honest beyond them."""

import timeit
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest

from ipc.profile_table import DecodePoint, PrefillPoint, StageShares
from ipc.vocabulary import Parallelism
from planner.errors import InfeasibleShape, PlannerError, ProfileError
from planner.latency.choose import Knowledge, latency_model, profile_names
from planner.latency.fitted import FittedLatency
from planner.latency.interface import EQUAL, Chunk, LatencyModel, Source
from planner.latency.measured import MeasuredLatency
from planner.latency.roofline import RooflineLatency
from planner.latency.table_fit import fit_table
from tests.planner.profile_tables import (
    decode_ms,
    mixed_ms,
    prefill_ms,
    profile_table,
    written,
)

TABLE = profile_table()
MODEL = MeasuredLatency(TABLE)
ONE_SIZE = [{"num_prompts": 4 // n, "num_tokens": 16 * n, "ms": 9} for n in (1, 2, 4)]


def decode_s(model: LatencyModel, batch: int, context_tokens: float) -> float:
    return model.decode(batch, context_tokens).seconds(context_tokens)


def test_measured_prefills_are_given_back() -> None:
    for point in TABLE.prefill:
        answer = MODEL.prefill([Chunk(point.num_tokens)] * point.num_prompts)
        assert 1000 * answer.seconds == pytest.approx(point.ms, rel=1e-6)
        assert answer.source is Source.MEASURED


def test_measured_decodes_are_given_back() -> None:
    for point in TABLE.decode:
        tokens = point.batch * point.context
        assert 1000 * decode_s(MODEL, point.batch, tokens) == pytest.approx(point.ms)


NOISY_MS = {1: (13.3, 13.0, 13.0), 2: (13.8, 12.3, 13.8), 4: (12.4, 15.4, 16.6)}
NOISY_CONTEXTS = (64, 256, 512)


def noisy(rows: dict[int, tuple[float, ...]]) -> MeasuredLatency:
    """The table with these decodes."""
    points = [
        DecodePoint(batch, context, ms)
        for batch, row in rows.items()
        for context, ms in zip(NOISY_CONTEXTS, row, strict=True)
    ]
    return MeasuredLatency(msgspec.structs.replace(TABLE, decode=tuple(points)))


def test_noise_makes_no_decode_shorter_for_a_larger_batch_or_a_longer_context() -> None:
    model = noisy(NOISY_MS)
    grid = np.array([[decode_s(model, b, b * c) for c in NOISY_CONTEXTS] for b in (1, 2, 3, 4, 6)])
    assert (np.diff(grid, axis=0) >= -1e-12).all()
    assert (np.diff(grid, axis=1) >= -1e-12).all()


def test_a_level_stretch_takes_what_it_took_in_the_mean() -> None:
    """A bug: each value was raised to the largest before it, so that short steps were promised 5 %
    slower than they had been measured."""
    model = noisy({1: NOISY_MS[1], 2: (14.0, 15.0, 16.0), 4: (17.0, 18.0, 19.0)})
    for context in NOISY_CONTEXTS:
        assert 1000 * decode_s(model, 1, context) == pytest.approx(13.1)
    both = noisy({1: (13.0, 14.0, 15.0), 2: (12.0, 14.5, 15.5), 4: (17.0, 18.0, 19.0)})
    for batch in (1, 2):
        assert 1000 * decode_s(both, batch, batch * 64) == pytest.approx(12.5)


def test_measured_mixed_steps_are_given_back() -> None:
    for point in TABLE.mixed:
        chunks, tokens = [Chunk(point.num_new, point.num_cached)], point.batch * point.context
        answer = MODEL.mixed(chunks, point.batch, tokens)
        assert 1000 * answer.seconds == pytest.approx(point.ms, rel=1e-6)
        assert answer.source is Source.MEASURED


def test_measured_pulls_are_given_back_and_continued() -> None:
    inside, beyond = MODEL.transfer(512), MODEL.transfer(4096)
    assert inside.seconds == pytest.approx(0.612e-3)
    assert beyond.seconds == pytest.approx(4.196e-3)
    assert (inside.source, beyond.source) == (Source.MEASURED, Source.FITTED)


def test_between_prefill_points_the_square_is_kept() -> None:
    """A straight line from 1,024 to 2,048 would be 3 % too long in the middle."""
    answer = MODEL.prefill([Chunk(1536)])
    assert 1000 * answer.seconds == pytest.approx(prefill_ms([1536]), rel=1e-6)


def test_several_prompts_take_less_than_one_of_their_length() -> None:
    packed, alone = MODEL.prefill([Chunk(500)] * 3), MODEL.prefill([Chunk(1500)])
    assert 1000 * packed.seconds == pytest.approx(prefill_ms([500] * 3), rel=1e-6)
    assert packed.seconds < alone.seconds


def test_cached_tokens_cost_what_chunks_with_them_took() -> None:
    answer = MODEL.prefill([Chunk(200, 700)])
    assert 1000 * answer.seconds == pytest.approx(prefill_ms([200], 700), rel=1e-6)
    assert answer.source is Source.MEASURED
    beyond = MODEL.prefill([Chunk(1024, 2048)])
    assert 1000 * beyond.seconds == pytest.approx(prefill_ms([1024], 2048), rel=1e-6)
    assert beyond.source is Source.FITTED


def test_more_tokens_never_take_less() -> None:
    noisy = (
        *TABLE.prefill[:2],
        PrefillPoint(1, 256, TABLE.prefill[1].ms - 3.0),
        *TABLE.prefill[3:],
    )
    model = MeasuredLatency(msgspec.structs.replace(TABLE, prefill=noisy))
    times = [model.prefill([Chunk(n)]).seconds for n in range(1, 4000, 7)]
    assert times == sorted(times)


def test_beyond_the_longest_prefill_the_fit_goes_on_without_a_jump() -> None:
    edge, beyond = MODEL.prefill([Chunk(2048)]), MODEL.prefill([Chunk(2049)])
    assert beyond.source is Source.FITTED
    assert 0 < beyond.seconds - edge.seconds < 3e-3
    assert 1000 * MODEL.prefill([Chunk(8000)]).seconds == pytest.approx(prefill_ms([8000]))


def test_decode_is_bilinear_in_batch_and_context_of_each() -> None:
    line = MODEL.decode(9, 9 * 500)
    assert line.source is Source.MEASURED
    assert 1000 * line.seconds(9 * 500) == pytest.approx(decode_ms(9, 9 * 500))


def test_a_line_is_valid_to_the_next_knot_in_summed_context() -> None:
    assert MODEL.decode(9, 9 * 500).until_tokens == 9 * 1024
    assert MODEL.decode(9, 9 * 1024).until_tokens == 9 * 2048


@pytest.mark.parametrize("batch", [1, 3, 16, 40])
def test_lines_agree_with_asking_again_and_hand_over_without_a_jump(batch: int) -> None:
    bent = tuple(
        DecodePoint(p.batch, p.context, p.ms * (1 + p.context / 4000)) for p in TABLE.decode
    )
    model = MeasuredLatency(msgspec.structs.replace(TABLE, decode=bent))
    tokens = float(batch)
    while (line := model.decode(batch, tokens)).until_tokens < inf:
        for share in (0.1, 0.5, 0.999):
            inside = tokens + share * (line.until_tokens - tokens)
            assert line.seconds(inside) == pytest.approx(decode_s(model, batch, inside))
        tokens = line.until_tokens
        assert line.seconds(tokens) == pytest.approx(decode_s(model, batch, tokens))


def test_beyond_the_decode_grid_the_fit_answers_and_says_so() -> None:
    for batch, context in ((16, 5000), (40, 500), (1, 10)):
        line = MODEL.decode(batch, batch * context)
        assert line.source is Source.FITTED
        expected = decode_ms(batch, batch * context)
        assert 1000 * line.seconds(batch * context) == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_room_for_long_contexts_leans_on_its_neighbour_and_the_fit() -> None:
    short = tuple(p for p in TABLE.decode if p.batch * p.context <= 16 * 1024)
    model = MeasuredLatency(msgspec.structs.replace(TABLE, decode=short))
    line = model.decode(16, 16 * 1500)
    assert line.source is Source.FITTED
    assert 1000 * line.seconds(16 * 1500) == pytest.approx(decode_ms(16, 16 * 1500), rel=1e-6)


def test_between_mixed_points_the_ratio_to_the_sum_is_kept() -> None:
    answer = MODEL.mixed([Chunk(300, 500)], 5, 5 * 600)
    assert answer.source is Source.MEASURED
    assert 1000 * answer.seconds == pytest.approx(mixed_ms(300, 500, 5, 600), rel=0.02)


def test_without_mixed_points_a_mix_is_a_sum_and_called_fitted() -> None:
    bare = MeasuredLatency(profile_table(bare=True))
    answer = bare.mixed([Chunk(128)], 4, 4 * 256)
    assert answer.source is Source.FITTED
    assert 1000 * answer.seconds == pytest.approx(prefill_ms([128]) + decode_ms(4, 1024))
    with pytest.raises(ProfileError, match="has no pulls"):
        bare.transfer(100)


def test_a_stage_takes_an_equal_part_of_the_measured_step() -> None:
    halves = MeasuredLatency(profile_table(pp=2))
    assert (halves.num_stages, halves.num_devices) == (2, 2)
    assert halves.prefill([Chunk(256)]).seconds == pytest.approx(prefill_ms([256]) / 2000)
    assert decode_s(halves, 4, 1024) == pytest.approx(decode_ms(4, 1024) / 2000)


def test_the_slowest_stage_is_as_measured_and_never_quicker_than_the_mean_one() -> None:
    table = profile_table(pp=2)
    assert MeasuredLatency(table).slowest == EQUAL
    shares = StageShares(prefill=0.65, decode=0.49)
    uneven = MeasuredLatency(msgspec.structs.replace(table, slowest_stage=shares))
    assert uneven.slowest == (1.3, 1.0)
    assert uneven.prefill([Chunk(256)]) == MeasuredLatency(table).prefill([Chunk(256)])


def test_a_table_from_before_stages_were_told_apart_is_read(tmp_path: Path) -> None:
    body = msgspec.to_builtins(profile_table(pp=2))
    del body["slowest_stage"]
    path = tmp_path / "old.json"
    path.write_bytes(orjson.dumps(body))
    assert MeasuredLatency.read(path).slowest == EQUAL


def test_hot_calls_cost_microseconds() -> None:
    """Loosely: the point is no array library and no search over all points in each call."""
    chunks = [Chunk(700)]
    assert min(timeit.repeat(lambda: MODEL.prefill(chunks), number=1000, repeat=5)) < 15e-3
    assert min(timeit.repeat(lambda: MODEL.decode(9, 4500), number=1000, repeat=5)) < 15e-3


def test_a_table_is_read_from_its_file(tmp_path: Path) -> None:
    model = MeasuredLatency.read(written(tmp_path, TABLE))
    assert model.prefill([Chunk(99)]) == MODEL.prefill([Chunk(99)])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": 1}, "version 1, this planner reads version 2"),
        ({"version": 7}, "version 7, this planner reads version 2"),
        ({"decode": [{"batch": 1, "context": "x", "ms": 1}]}, r"decode\[0\].context"),
        (
            {"prefill": [{"num_prompts": 1, "num_tokens": 16, "ms": 0}]},
            r"prefill\[0\].ms is 0, not",
        ),
        ({"transfer": [{"num_tokens": 16, "ms": 1e-320}]}, r"transfer\[0\].ms is 9.99989e-321"),
        ({"transfer": [{"num_tokens": 16, "ms": 1e300}]}, r"transfer\[0\].ms is 1e\+300, not"),
        ({"saturation_tokens": 10**15}, "saturation_tokens is 1000000000000000, at most 1000000"),
        ({"block_size": 10**9}, "block_size is 1000000000, at most 65536 can be"),
        ({"version": "2"}, "version '2', this planner reads version 2"),
        ({"decode": []}, "decode has fewer than 3 points"),
        ({"block_size": 0}, r"`int` >= 1 - at `\$.block_size`"),
        ({"decode": [{"batch": 1, "context": 64, "ms": 8}] * 3}, r"decode\[1\] repeats"),
        ({"prefill": ONE_SIZE}, "prefill has steps of one size alone"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(
    tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    with pytest.raises(ProfileError, match=words) as caught:
        MeasuredLatency.read(written(tmp_path, TABLE, **changed))
    assert "profile.json" in str(caught.value)


def test_a_table_that_is_not_there_or_no_json_says_so(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        MeasuredLatency.read(tmp_path / "none.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(ProfileError, match="not a profile"):
        MeasuredLatency.read(tmp_path / "half.json")


def test_a_fit_of_the_table_finds_the_coefficients_and_the_interaction() -> None:
    fit = fit_table(TABLE)
    assert 1000 * fit.decode.seconds(7, 3000) == pytest.approx(decode_ms(7, 3000), rel=1e-6)
    assert 1000 * fit.prefill.seconds(600, 600**2) == pytest.approx(prefill_ms([600]), rel=0.02)
    mixed_s = FittedLatency(fit).mixed([Chunk(512)], 8, 8 * 128).seconds
    without = FittedLatency(replace(fit, interaction=type(fit.interaction)()))
    assert without.mixed([Chunk(512)], 8, 8 * 128).seconds < mixed_s
    assert 1000 * mixed_s == pytest.approx(mixed_ms(512, 0, 8, 128), rel=0.1)


def test_the_best_source_is_chosen(tmp_path: Path) -> None:
    known = Knowledge("smollm2-135m", device="cpu", tables=(written(tmp_path, TABLE),))
    assert isinstance(latency_model(known, Parallelism(1, 1)), MeasuredLatency)
    assert isinstance(latency_model(known, Parallelism(1, 2)), FittedLatency)
    assert isinstance(latency_model(known, Parallelism(3, 1)), RooflineLatency)


def test_a_named_profile_answers_for_its_degrees() -> None:
    shipped, raw = (
        latency_model(Knowledge("opt-13b", profile=name), Parallelism(2, 1))
        for name in ("distserve", "distserve-raw")
    )
    ratio = shipped.prefill([Chunk(512)]).seconds / raw.prefill([Chunk(512)]).seconds
    assert ratio == pytest.approx(1.1)
    assert {"distserve", "distserve-raw", "distserve-added"} < {*profile_names()}


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 23_040), ("float32", 46_080)])
def test_a_table_is_of_the_model_whose_keys_and_values_have_its_size(
    dtype: str, num_bytes: int, tmp_path: Path
) -> None:
    path = written(tmp_path, TABLE, dtype=dtype, kv_bytes_per_token=num_bytes)
    assert isinstance(
        latency_model(Knowledge("smollm2-135m", tables=(path,)), Parallelism()), MeasuredLatency
    )
    told = f"is no profile of opt-1.3b: it was measured with toy, .* take {num_bytes} bytes"
    with pytest.raises(ProfileError, match=told):
        latency_model(Knowledge("opt-1.3b", tables=(path,)), Parallelism())


def test_what_nothing_is_known_of_is_said_in_a_sentence() -> None:
    with pytest.raises(PlannerError, match="nothing is known of opt-13b"):
        latency_model(Knowledge("opt-13b"), Parallelism())
    with pytest.raises(ProfileError, match="no profile 'best'"):
        latency_model(Knowledge("opt-13b", profile="best"), Parallelism())
    with pytest.raises(InfeasibleShape, match="do not divide by 3"):
        latency_model(Knowledge("opt-13b", device="a100"), Parallelism(3, 1))
