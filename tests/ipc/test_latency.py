"""Appendix A in the paper's terms and condensed: the same times, and the relations it states."""

import pytest

from ipc.latency import (
    DecodeRegimes,
    DecodeTerms,
    PaperCoefficients,
    PrefillTerms,
    Sizes,
    square_tokens,
)

PAPER = PaperCoefficients(c1=2e-15, c2=4e-13, c3=3e-3, c4=1.3e-12, c5=6e-13)
OPT_13B = Sizes(hidden_size=5120, mlp_size=20480)


def test_prefill_is_its_three_terms() -> None:
    h, m, b, lengths = 5120, 20480, 16, (100, 300)
    t, t2 = sum(lengths), sum(length**2 for length in lengths)
    expected = PAPER.c1 * (4 * t * h * h + 2 * t * h * m) + PAPER.c2 * 3 * h * t2 / b + PAPER.c3
    assert PAPER.prefill_s(OPT_13B, t, t2) == pytest.approx(expected)


def test_decode_is_its_two_terms() -> None:
    h, m, t = 5120, 20480, 9000
    expected = PAPER.c4 * (4 * h * h + 2 * h * m) + PAPER.c5 * 3 * h * t
    assert PAPER.decode_s(OPT_13B, t) == pytest.approx(expected)


def test_the_condensed_form_gives_the_same_times() -> None:
    prefill, decode = PAPER.prefill_terms(OPT_13B), PAPER.decode_terms(OPT_13B)
    for tokens in (1, 512, 4096):
        squares = tokens**2
        assert prefill.seconds(tokens, squares) == pytest.approx(
            PAPER.prefill_s(OPT_13B, tokens, squares)
        )
        assert decode.seconds(7, tokens) == pytest.approx(PAPER.decode_s(OPT_13B, tokens))


def test_prefill_products_do_not_depend_on_how_tokens_are_packed() -> None:
    """T1 knows t alone; only attention (t2) sees the lengths."""
    alone = PAPER.prefill_s(OPT_13B, 1000, 1000**2)
    packed = PAPER.prefill_s(OPT_13B, 1000, 2 * 500**2)
    saved = PAPER.prefill_attention_s(OPT_13B, 1000**2 - 2 * 500**2)
    assert alone - packed == pytest.approx(saved)


def test_decode_products_do_not_depend_on_the_batch() -> None:
    assert PAPER.decode_gemm_s(OPT_13B) == PAPER.decode_s(OPT_13B, 0)


def test_tensor_parallelism_divides_all_but_the_constant() -> None:
    two = Sizes(hidden_size=5120, mlp_size=20480, tp=2)
    half = (PAPER.prefill_s(OPT_13B, 512, 512**2) - PAPER.c3) / 2
    assert PAPER.prefill_s(two, 512, 512**2) == pytest.approx(half + PAPER.c3)
    assert PAPER.decode_s(two, 512) == pytest.approx(PAPER.decode_s(OPT_13B, 512) / 2)


def test_larger_attention_tiles_move_less() -> None:
    wide = Sizes(hidden_size=5120, mlp_size=20480, block_size=32)
    assert PAPER.prefill_attention_s(wide, 1e6) == PAPER.prefill_attention_s(OPT_13B, 1e6) / 2


def test_chunks_of_a_prompt_add_up_to_its_square() -> None:
    chunks = [(256, 0), (256, 256), (88, 512)]
    assert sum(square_tokens(new, cached) for new, cached in chunks) == 600**2


def test_short_prefills_never_fall_below_the_floor() -> None:
    terms = PrefillTerms(0.001, 1e-4, 0.0, floor_s=0.010)
    assert terms.seconds(1, 1) == 0.010
    assert terms.seconds(1000, 0) == pytest.approx(0.101)


def test_the_regime_changes_at_the_threshold() -> None:
    regimes = DecodeRegimes(DecodeTerms(1.0, 0.0, 0.0), DecodeTerms(2.0, 0.0, 0.0))
    assert [regimes.seconds(batch, 0) for batch in (1, 94, 95, 200)] == [1.0, 1.0, 2.0, 2.0]


def test_scaling_scales_every_term() -> None:
    terms = PrefillTerms(1.0, 2.0, 3.0, 0.5).scaled(1.1)
    assert terms.seconds(10, 100) == pytest.approx(1.1 * (1 + 20 + 300))
    regimes = DecodeRegimes(DecodeTerms(1.0, 2.0, 3.0), DecodeTerms(4.0, 5.0, 6.0)).scaled(2)
    assert regimes.seconds(100, 10) == 2 * (4 + 600 + 50)
