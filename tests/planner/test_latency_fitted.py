"""Fitted latency: published coefficients, fits that recover what made them, and their shape."""

import random
from math import inf

import pytest

from ipc.latency import DecodeRegimes, DecodeTerms, PrefillTerms
from ipc.vocabulary import Parallelism
from planner.errors import ProfileError
from planner.latency.fitted import (
    REFERENCE_OVERHEADS,
    Fit,
    FittedLatency,
    Interaction,
    StageOverheads,
)
from planner.latency.fitting import (
    DecodeSample,
    MixedSample,
    PrefillSample,
    fit_decode,
    fit_interaction,
    fit_packed,
    fit_prefill,
)
from planner.latency.interface import Chunk, LatencyModel, Source
from planner.latency.published import doubt, published_engines, published_fit, published_latency

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
DECODE = DecodeRegimes(DecodeTerms(0.02, 6e-7, 4e-5), DecodeTerms(0.01, 6e-7, 15e-5))
FIT = Fit(PrefillTerms(0.018, 1e-4, 7e-9), DECODE)


def published(model: str, tp: int, pp: int = 1, engine: str = "distserve") -> FittedLatency:
    return published_latency(engine, model, Parallelism(tp, pp))


@pytest.mark.parametrize(
    ("model", "milliseconds"),
    [
        ("opt-13b", {1: 72.1, 2: 50.5, 4: 31.7}),
        ("opt-66b", {2: 189, 3: 136, 4: 109, 8: 81}),
    ],
)
def test_published_coefficients_predict_a_prefill_of_512(
    model: str, milliseconds: dict[int, float]
) -> None:
    for tp, expected in milliseconds.items():
        answer = published(model, tp).prefill([Chunk(512)])
        assert 1000 * answer.seconds == pytest.approx(expected, rel=3e-3)
        assert answer.source is Source.FITTED


def test_published_decode_changes_regime_at_95() -> None:
    """13B at tp 1: 19.93 + 6.27e-4 KV + 0.0385 B below, 7.17 + 5.80e-4 KV + 0.158 B from 95 on."""
    model = published("opt-13b", 1)
    below, above = model.decode(94, 50_000), model.decode(95, 50_000)
    assert 1000 * below.seconds(50_000) == pytest.approx(19.9347 + 31.3468 + 3.6197, rel=1e-4)
    assert 1000 * above.seconds(50_000) == pytest.approx(7.16619 + 28.99 + 15.03955, rel=1e-4)


@pytest.mark.parametrize("engine", ["distserve", "vllm"])
def test_raw_coefficients_times_the_factors_are_the_shipped_ones(engine: str) -> None:
    found = published_engines()[engine]
    for model, degrees in found.models.items():
        for tp in degrees:
            raw = published_fit(engine, model, tp, raw=True)
            shipped = published_fit(engine, model, tp)
            again = raw.prefill.scaled(found.prefill_factor)
            assert again.seconds(512, 512**2) == pytest.approx(shipped.prefill.seconds(512, 512**2))
            decode = raw.decode.scaled(found.decode_factor)
            assert decode.seconds(99, 9000) == pytest.approx(shipped.decode.seconds(99, 9000))


def test_raw_prefills_of_both_engines_are_nearly_the_same() -> None:
    """As the authors' history has them: 15.75 + 0.1004 t against 16.46 + 0.0926 t."""
    vllm = published_fit("vllm", "opt-13b", 1, raw=True).prefill
    distserve = published_fit("distserve", "opt-13b", 1, raw=True).prefill
    assert 1000 * vllm.base_s == pytest.approx(15.7516, rel=1e-4)
    assert 1000 * vllm.per_token_s == pytest.approx(0.100364, rel=1e-4)
    assert 1000 * distserve.base_s == pytest.approx(16.4569, rel=1e-4)
    assert 1e3 * distserve.per_square_s == pytest.approx(6.475e-6, rel=1e-3)


def test_the_row_that_is_no_measurement_of_distserve_is_marked() -> None:
    assert "vLLM" in str(doubt("distserve", "facebook/opt-66b", 8))
    assert doubt("distserve", "opt-66b", 4) is None


def test_a_negative_square_term_never_makes_a_longer_prompt_quicker() -> None:
    """vLLM's OPT-66B at tp 2 turns down at 26,893 tokens, by an artefact of its fit."""
    model = published("opt-66b", 2, engine="vllm")
    times = [model.prefill([Chunk(n)]).seconds for n in range(500, 60_000, 500)]
    assert times == sorted(times)
    assert 1000 * model.prefill([Chunk(512)]).seconds == pytest.approx(252.43, rel=1e-4)
    chunked = [Chunk(256), Chunk(256, 256)]
    whole, parts = model.prefill([Chunk(512)]), model.prefill(chunked)
    assert parts.seconds == pytest.approx(whole.seconds)


@pytest.mark.parametrize(
    ("engine", "model", "tp", "words"),
    [
        ("sglang", "opt-13b", 1, "no published profile"),
        ("vllm", "opt-175b", 8, "has no opt-175b"),
        ("vllm", "opt-13b", 8, "there are 1, 2, 4"),
    ],
)
def test_what_is_not_published_is_said_in_a_sentence(
    engine: str, model: str, tp: int, words: str
) -> None:
    with pytest.raises(ProfileError, match=words):
        published_fit(engine, model, tp)


def test_a_pipeline_stage_takes_its_share_and_its_overhead() -> None:
    whole = FittedLatency(FIT)
    overheads = StageOverheads(prefill_stage_s=1e-3)
    halves = FittedLatency(FIT, Parallelism(1, 2), overheads=overheads)
    chunks = [Chunk(512)]
    assert halves.prefill(chunks).seconds == pytest.approx(whole.prefill(chunks).seconds / 2 + 2e-3)
    assert halves.decode(4, 900).seconds(900) == pytest.approx(
        whole.decode(4, 900).seconds(900) / 2
    )
    assert (halves.num_stages, halves.num_devices) == (2, 2)


def test_the_references_engine_adds_two_milliseconds_and_more_with_context() -> None:
    plain, with_engine = FittedLatency(FIT), FittedLatency(FIT, overheads=REFERENCE_OVERHEADS)
    added = with_engine.prefill([Chunk(512)]).seconds - plain.prefill([Chunk(512)]).seconds
    assert added == pytest.approx(3e-3 + 512e-7)
    line, base = with_engine.decode(8, 4000), plain.decode(8, 4000)
    assert line.seconds(4000) - base.seconds(4000) == pytest.approx(2e-3 + 4000e-7)


def test_chunks_of_a_prompt_take_what_the_prompt_takes_and_their_own_starts() -> None:
    model = FittedLatency(FIT)
    chunks = [Chunk(256), Chunk(256, 256), Chunk(88, 512)]
    apart = sum(model.prefill([chunk]).seconds for chunk in chunks)
    assert apart == pytest.approx(model.prefill([Chunk(600)]).seconds + 2 * FIT.prefill.base_s)


def test_a_decode_line_holds_for_ever() -> None:
    line = FittedLatency(FIT).decode(8, 1000)
    assert line.until_tokens == inf
    assert line.seconds(9000) == pytest.approx(DECODE.seconds(8, 9000))


def test_a_mixed_step_is_longer_than_its_parts_and_shorter_than_their_sum() -> None:
    model = FittedLatency(FIT)
    prefill_s = model.prefill([Chunk(512)]).seconds
    decode_s = model.decode(32, 30_000).seconds(30_000)
    mixed_s = model.mixed([Chunk(512)], 32, 30_000).seconds
    assert max(prefill_s, decode_s) < mixed_s < prefill_s + decode_s


def test_an_interaction_makes_mixed_steps_alone_longer() -> None:
    coupled = FittedLatency(Fit(FIT.prefill, DECODE, Interaction(2e-5, 1e-7)))
    plain = FittedLatency(Fit(FIT.prefill, DECODE, Interaction()))
    added = coupled.mixed([Chunk(500)], 32, 30_000).seconds
    added -= plain.mixed([Chunk(500)], 32, 30_000).seconds
    assert added == pytest.approx(32 * 2e-5 + 32 * 500 * 1e-7)
    assert coupled.prefill([Chunk(500)]) == plain.prefill([Chunk(500)])


def test_a_mix_that_was_never_measured_takes_more_than_its_parts() -> None:
    """10 to 17 % were measured; a sum alone makes colocated services look that much too fast."""
    parts = FittedLatency(Fit(FIT.prefill, DECODE, Interaction()))
    guessed = FittedLatency(FIT)
    ratio = (
        guessed.mixed([Chunk(500)], 32, 30_000).seconds
        / parts.mixed([Chunk(500)], 32, 30_000).seconds
    )
    assert 1.10 <= ratio <= 1.17


def test_mixing_with_nothing_is_either_part_alone() -> None:
    model = FittedLatency(FIT)
    assert model.mixed([Chunk(100)], 0, 0) == model.prefill([Chunk(100)])
    assert model.mixed([], 8, 900).seconds == model.decode(8, 900).seconds(900)


def test_no_link_no_pull() -> None:
    with pytest.raises(ProfileError, match="no link"):
        FittedLatency(FIT).transfer(100)


def test_a_pull_of_opt_66b_takes_what_nvlink_takes() -> None:
    """1,000 tokens are 2.36 GB: 10 ms over the measured 230 GB/s, and two ranks halve it."""
    assert published("opt-66b", 2).transfer(1000).seconds == pytest.approx(5.2e-3, rel=0.02)


def prefill_samples(terms: PrefillTerms, noise: float = 0.0) -> list[PrefillSample]:
    draw = random.Random(3)
    samples = []
    for length in LENGTHS:
        for number in (1, 4):
            tokens, squares = number * length, number * length**2
            seconds = terms.seconds(tokens, squares) * (1 + draw.uniform(-noise, noise))
            samples.append(PrefillSample(tokens, squares, seconds))
    return samples


def decode_samples(regimes: DecodeRegimes) -> list[DecodeSample]:
    return [
        DecodeSample(batch, batch * context, regimes.seconds(batch, batch * context))
        for batch in (1, 8, 32, 64, 96, 128, 192)
        for context in (64, 512, 2048)
    ]


def test_a_prefill_fit_recovers_the_coefficients() -> None:
    terms, spread = fit_prefill(prefill_samples(FIT.prefill))
    assert terms.base_s == pytest.approx(0.018, rel=1e-6)
    assert terms.per_token_s == pytest.approx(1e-4, rel=1e-6)
    assert terms.per_square_s == pytest.approx(7e-9, rel=1e-6)
    assert spread < 1e-9


def test_a_prefill_fit_finds_the_floor() -> None:
    terms, spread = fit_prefill(prefill_samples(PrefillTerms(0.0, 1e-4, 7e-9, floor_s=0.02)))
    assert terms.floor_s == pytest.approx(0.02, rel=1e-6)
    assert terms.per_token_s == pytest.approx(1e-4, rel=1e-6)
    assert spread < 1e-9


def test_noise_is_kept_as_a_spread() -> None:
    _, spread = fit_prefill(prefill_samples(FIT.prefill, noise=0.05))
    assert 0.01 < spread < 0.05


def test_a_fit_is_never_negative() -> None:
    """Times that bend down would ask for a negative square; a step never rewards more tokens."""
    samples = [PrefillSample(n, n**2, n**0.8) for n in LENGTHS]
    terms, _ = fit_prefill(samples)
    assert min(terms.base_s, terms.per_token_s, terms.per_square_s) >= 0


def test_a_decode_fit_recovers_both_regimes() -> None:
    regimes, spread = fit_decode(decode_samples(DECODE), threshold=95)
    for found, made in ((regimes.small, DECODE.small), (regimes.large, DECODE.large)):
        assert found.base_s == pytest.approx(made.base_s, rel=1e-6)
        assert found.per_token_s == pytest.approx(made.per_token_s, rel=1e-6)
        assert found.per_sequence_s == pytest.approx(made.per_sequence_s, rel=1e-6)
    assert spread < 1e-9


def test_one_regime_cannot_hide_two() -> None:
    _, spread = fit_decode(decode_samples(DECODE))
    assert spread > 0.01


def test_a_packed_fit_finds_what_each_further_prompt_costs() -> None:
    numbers = [1, 1, 1, 2, 4, 8]
    lengths = [64, 512, 2048, 32, 64, 128]
    samples = [
        PrefillSample(n * x, n * x * x, 0.001 + 1e-4 * n * x + 1e-8 * n * x * x + 5e-4 * (n - 1))
        for n, x in zip(numbers, lengths, strict=True)
    ]
    fit = fit_packed(samples, numbers)
    assert fit.per_prompt_s == pytest.approx(5e-4, rel=1e-6)
    assert fit.per_square_s == pytest.approx(1e-8, rel=1e-6)


def test_an_interaction_is_found_again() -> None:
    samples = [
        MixedSample(tokens, batch, 0.05 + 2e-5 * batch + 1e-7 * tokens * batch, 0.05)
        for tokens in (128, 512)
        for batch in (4, 16, 32)
    ]
    found = fit_interaction(samples)
    assert found.per_sequence_s == pytest.approx(2e-5, rel=1e-6)
    assert found.per_product_s == pytest.approx(1e-7, rel=1e-6)
    assert fit_interaction([]) == Interaction()


def test_too_few_steps_make_no_fit() -> None:
    with pytest.raises(ProfileError, match="3 measured steps at least, not 2"):
        fit_decode([DecodeSample(1, 1, 1.0)] * 2)


def test_it_has_the_interfaces_face() -> None:
    model: LatencyModel = FittedLatency(FIT)
    assert model.source is Source.FITTED
