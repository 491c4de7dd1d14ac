"""Appendix A's latency formulas (DistServe, arXiv 2401.09670): step times from token sums.

Pure arithmetic, no profile and no clock: the planner fits the coefficients, the daemon predicts
with them. Twice the same model: in the paper's terms, C1 to C5 times the sizes of the network, and
condensed to what a fit of one (model, device, tp) sees: `a + b * tokens + c * squares` for a
prefill, `a + b * context + c * batch` for a decode.
"""

import msgspec

BATCH_THRESHOLD = 95
"""Where the published decode fits change regime (DistServe's repository)."""


def square_tokens(num_new: int, num_cached: int = 0) -> int:
    """A prompt's or a chunk's share of `t2`, the sum of squared lengths in Appendix A.

    A chunk attends to all that came before it, so its chunks add up to a whole prompt:
    `t * (t + 2 * cached)` summed over the chunks of l tokens is l squared.
    """
    return num_new * (num_new + 2 * num_cached)


class Sizes(msgspec.Struct, frozen=True):
    """What Appendix A knows of a network and its attention kernel, summed over nothing: per layer.

    Args:
        hidden_size: h, which is heads times head size (n * s).
        mlp_size: m, the inner width of the MLP.
        block_size: b, the tile of the prefill attention kernel, 16 or 32.
        tp: divides the width of each matrix and the heads. The paper says that h, n and m are
            divided by it; in a product of two of them one factor is, for a rank holds a slice.
    """

    hidden_size: int
    mlp_size: int
    block_size: int = 16
    tp: int = 1

    @property
    def matrix_elements(self) -> float:
        """4h^2 + 2hm, the elements of a layer's matrices on one rank."""
        h, m = self.hidden_size, self.mlp_size
        return (4 * h * h + 2 * h * m) / self.tp


class PrefillTerms(msgspec.Struct, frozen=True):
    """Condensed prefill: `max(floor, base + per_token * t + per_square * t2)`, in seconds.

    `floor_s` is what the shortest prompts take: there the device is not busy with tokens but with
    starting kernels and reading weights.
    """

    base_s: float
    per_token_s: float
    per_square_s: float
    floor_s: float = 0.0

    def seconds(self, tokens: float, squares: float) -> float:
        line_s = self.base_s + self.per_token_s * tokens + self.per_square_s * squares
        return max(self.floor_s, line_s)

    def scaled(self, factor: float) -> "PrefillTerms":
        return PrefillTerms(
            self.base_s * factor,
            self.per_token_s * factor,
            self.per_square_s * factor,
            self.floor_s * factor,
        )


class DecodeTerms(msgspec.Struct, frozen=True):
    """Condensed decode step: `base + per_token * context + per_sequence * batch`, in seconds.

    `context` is the sum of the sequences' lengths. The paper's form has no term for the batch; the
    repository's fits do, and they need it.
    """

    base_s: float
    per_token_s: float
    per_sequence_s: float = 0.0

    def seconds(self, batch: int, context_tokens: float) -> float:
        return self.base_s + self.per_sequence_s * batch + self.per_token_s * context_tokens

    def scaled(self, factor: float) -> "DecodeTerms":
        return DecodeTerms(
            self.base_s * factor, self.per_token_s * factor, self.per_sequence_s * factor
        )


class DecodeRegimes(msgspec.Struct, frozen=True):
    """Two decode lines: `small` for batches below `threshold`, `large` from there on."""

    small: DecodeTerms
    large: DecodeTerms
    threshold: int = BATCH_THRESHOLD

    def terms(self, batch: int) -> DecodeTerms:
        return self.small if batch < self.threshold else self.large

    def seconds(self, batch: int, context_tokens: float) -> float:
        return self.terms(batch).seconds(batch, context_tokens)

    def scaled(self, factor: float) -> "DecodeRegimes":
        return DecodeRegimes(self.small.scaled(factor), self.large.scaled(factor), self.threshold)


class PaperCoefficients(msgspec.Struct, frozen=True):
    """C1 to C5 of Appendix A: seconds per multiplied element, per element moved, and a constant.

    C1 belongs to prefill's matrix products, C2 to its attention, C3 to the runtime; C4 to decode's
    matrix products (bound by reading the weights), C5 to its attention.
    """

    c1: float
    c2: float
    c3: float
    c4: float
    c5: float

    def prefill_gemm_s(self, sizes: Sizes, tokens: float) -> float:
        """T1 = C1 * (4 t h^2 + 2 t h m)."""
        return self.c1 * tokens * sizes.matrix_elements

    def prefill_attention_s(self, sizes: Sizes, squares: float) -> float:
        """T2 = C2 * 3 h t2 / b."""
        return self.c2 * 3 * sizes.hidden_size * squares / (sizes.block_size * sizes.tp)

    def prefill_s(self, sizes: Sizes, tokens: float, squares: float) -> float:
        """T_prefill = T1 + T2 + C3."""
        gemm_s = self.prefill_gemm_s(sizes, tokens)
        return gemm_s + self.prefill_attention_s(sizes, squares) + self.c3

    def decode_gemm_s(self, sizes: Sizes) -> float:
        """T3 = C4 * (4 h^2 + 2 h m): the weights are read once, whatever the batch."""
        return self.c4 * sizes.matrix_elements

    def decode_attention_s(self, sizes: Sizes, context_tokens: float) -> float:
        """T4 = C5 * 3 h t."""
        return self.c5 * 3 * sizes.hidden_size * context_tokens / sizes.tp

    def decode_s(self, sizes: Sizes, context_tokens: float) -> float:
        """T_decode = T3 + T4."""
        return self.decode_gemm_s(sizes) + self.decode_attention_s(sizes, context_tokens)

    def prefill_terms(self, sizes: Sizes) -> PrefillTerms:
        """The same prefill, condensed for one network."""
        per_square_s = self.prefill_attention_s(sizes, 1.0)
        return PrefillTerms(self.c3, self.prefill_gemm_s(sizes, 1.0), per_square_s)

    def decode_terms(self, sizes: Sizes) -> DecodeTerms:
        """The same decode, condensed for one network."""
        return DecodeTerms(self.decode_gemm_s(sizes), self.decode_attention_s(sizes, 1.0))
