"""Coefficients from measured steps: relative least squares, none of them negative.

Relative, because a millisecond matters more to a step of five than to one of a thousand; not
negative, because no step gets shorter by having more to do. What remains is kept as a spread.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from ipc.latency import BATCH_THRESHOLD, DecodeRegimes, DecodeTerms, PrefillTerms
from planner.errors import ProfileError
from planner.latency.fitted import Interaction
from planner.workload.requests import Floats

MIN_PER_REGIME = 4
"""Points that a decode regime of its own needs: one more than it has coefficients."""


class PrefillSample(NamedTuple):
    """One measured prefill: its tokens, their squares (`square_tokens`), and seconds."""

    tokens: int
    squares: float
    seconds: float


class DecodeSample(NamedTuple):
    """One measured decode step: sequences, the sum of their lengths, and seconds."""

    batch: int
    context_tokens: float
    seconds: float


class MixedSample(NamedTuple):
    """What one mixed step took beyond what its parts explain."""

    tokens: int
    batch: int
    step_s: float
    explained_s: float


class PackedFit(NamedTuple):
    """`base + per_token * t + per_square * t2 + per_prompt * (prompts - 1)`, and the spread."""

    base_s: float
    per_token_s: float
    per_square_s: float
    per_prompt_s: float
    spread: float


def fit_packed(samples: Sequence[PrefillSample], num_prompts: Sequence[int]) -> PackedFit:
    """A fit that knows how many prompts shared each step."""
    _require(len(samples), 3, "prefill")
    pairs = list(zip(samples, num_prompts, strict=True))
    rows = [(1.0, s.tokens, s.squares, number - 1.0) for s, number in pairs]
    seconds = np.array([s.seconds for s in samples])
    solution = _solve(rows, seconds, 1 / seconds)
    spread = _spread(np.array(rows) @ solution, seconds)
    a, b, c, d = (float(x) for x in solution)
    return PackedFit(a, b, c, d, spread)


def fit_prefill(samples: Sequence[PrefillSample]) -> tuple[PrefillTerms, float]:
    """Terms and relative spread. The shortest prefills may be a floor: as many as pays off."""
    _require(len(samples), 3, "prefill")
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    best = _line_above(ordered, 0)
    for num_floor in range(1, len(ordered) - 2):
        other = _line_above(ordered, num_floor)
        if other[1] < 0.9 * best[1] - 1e-9:
            best = other
    return best


def fit_decode(
    samples: Sequence[DecodeSample], threshold: int | None = None
) -> tuple[DecodeRegimes, float]:
    """Terms and relative spread; two regimes if there are points enough on both sides."""
    _require(len(samples), 3, "decode")
    limit = threshold or BATCH_THRESHOLD
    small = [s for s in samples if s.batch < limit]
    large = [s for s in samples if s.batch >= limit]
    if threshold is None or min(len(small), len(large)) < MIN_PER_REGIME:
        terms = _decode_terms(samples)
        regimes = DecodeRegimes(terms, terms, limit)
    else:
        regimes = DecodeRegimes(_decode_terms(small), _decode_terms(large), limit)
    predicted = [regimes.seconds(s.batch, s.context_tokens) for s in samples]
    return regimes, _spread(predicted, [s.seconds for s in samples])


def fit_interaction(samples: Sequence[MixedSample]) -> Interaction:
    """What mixing costs for each decode, and for each (token, decode)."""
    if not samples:
        return Interaction()
    rows = [(s.batch, s.tokens * s.batch) for s in samples]
    excess = [s.step_s - s.explained_s for s in samples]
    weights = np.array([1 / s.step_s for s in samples])
    per_sequence_s, per_product_s = _solve(rows, np.array(excess), weights)
    return Interaction(float(per_sequence_s), float(per_product_s))


def _line_above(ordered: Sequence[PrefillSample], num_floor: int) -> tuple[PrefillTerms, float]:
    """The first `num_floor` samples as a floor, a line for the others, and the spread of both."""
    seconds = np.array([s.seconds for s in ordered])
    rest = ordered[num_floor:]
    rows = [(1.0, s.tokens, s.squares) for s in rest]
    a, b, c = _solve(rows, seconds[num_floor:], 1 / seconds[num_floor:])
    # The mean that is best in relative squares.
    floored = seconds[:num_floor]
    floor_s = float(np.sum(1 / floored) / np.sum(1 / floored**2)) if num_floor else 0.0
    terms = PrefillTerms(float(a), float(b), float(c), floor_s)
    predicted = [terms.seconds(s.tokens, s.squares) for s in ordered]
    return terms, _spread(predicted, seconds)


def _decode_terms(samples: Sequence[DecodeSample]) -> DecodeTerms:
    rows = [(1.0, s.context_tokens, s.batch) for s in samples]
    seconds = np.array([s.seconds for s in samples])
    a, b, c = _solve(rows, seconds, 1 / seconds)
    return DecodeTerms(float(a), float(b), float(c))


def _solve(rows: Sequence[tuple[float, ...]], values: Floats, weights: Floats) -> Floats:
    """Non-negative least squares; columns are scaled first, for they differ by powers of ten."""
    matrix = np.array(rows, dtype=np.float64) * weights[:, None]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    solution: Floats = nnls(matrix / scale, values * weights)[0] / scale
    return solution


def _spread(predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> float:
    relative = np.asarray(predicted) / np.asarray(measured) - 1
    return float(np.sqrt(np.mean(relative**2)))


def _require(count: int, least: int, what: str) -> None:
    if count < least:
        raise ProfileError(f"a {what} fit needs {least} measured steps at least, not {count}")
