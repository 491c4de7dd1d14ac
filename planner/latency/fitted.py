"""Step times from fitted coefficients: Appendix A's condensed forms for one (model, device, tp).

Pipelines are the reference's: a stage takes the whole step divided by pp, plus what each stage
costs by itself. A mixed step reads the weights once and adds both kinds of attention, and what
the two cost each other: fitted where mixed steps were measured, else `UNMEASURED_MIX`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ipc.latency import DecodeRegimes, PrefillTerms
from ipc.vocabulary import Parallelism
from planner.errors import ProfileError
from planner.latency.interface import EQUAL, Chunk, Estimate, Source, StepLine
from planner.latency.pull import Pull

UNMEASURED_MIX = 1.13
"""Mixed steps over the sum of their parts: vLLM's on an RTX 4090 and an RTX PRO 6000 take 10 to
17 % more than the sum says (LLMServingSim's layer profiles). Without it a colocated service looks
that much too fast."""


@dataclass(frozen=True)
class Interaction:
    """What a mixed step takes beyond its parts: for each decode, and for each (token, decode)."""

    per_sequence_s: float = 0.0
    per_product_s: float = 0.0

    def seconds(self, tokens: int, batch: int) -> float:
        return self.per_sequence_s * batch + self.per_product_s * tokens * batch


@dataclass(frozen=True)
class Fit:
    """Coefficients of an instance's whole steps; the spreads are relative standard deviations of
    what was measured around them, zero where that is not known. `interaction` is None where no
    mixed step was measured."""

    prefill: PrefillTerms
    decode: DecodeRegimes
    interaction: Interaction | None = None
    prefill_spread: float = 0.0
    decode_spread: float = 0.0


@dataclass(frozen=True)
class StageOverheads:
    """What an engine adds to its kernels' times, in seconds.

    Args:
        prefill_stage_s: added to each stage of a prefill, once for every stage there is.
        engine_s: added to each step ...
        engine_per_token_s: ... with so much for each token of context. The reference adds both on
            the first stage alone; stages are equal here, so each carries its share.
    """

    prefill_stage_s: float = 0.0
    engine_s: float = 0.0
    engine_per_token_s: float = 0.0


REFERENCE_OVERHEADS = StageOverheads(prefill_stage_s=1e-3, engine_s=2e-3, engine_per_token_s=1e-7)
"""DistServe's simulator: 1 ms per stage; 2 ms and 0.1 us per token for Ray (base/worker.py)."""


class FittedLatency:
    """A latency model that answers from coefficients alone."""

    slowest = EQUAL
    source = Source.FITTED

    def __init__(
        self,
        fit: Fit,
        parallelism: Parallelism | None = None,
        *,
        overheads: StageOverheads | None = None,
        pull: Pull | None = None,
    ) -> None:
        parallelism, overheads = parallelism or Parallelism(), overheads or StageOverheads()
        self.fit = fit
        self.num_stages = parallelism.pp
        self.num_devices = parallelism.num_workers
        self._pull = pull
        self._engine_s = overheads.engine_s / self.num_stages
        self._engine_per_token_s = overheads.engine_per_token_s / self.num_stages
        self._prefill_extra_s = self._engine_s + overheads.prefill_stage_s * self.num_stages
        self._prefill = fit.prefill.scaled(1 / self.num_stages)
        self._decode = fit.decode.scaled(1 / self.num_stages)

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        terms = self._prefill
        if terms.per_square_s < 0:
            return self._bent_prefill(chunks)
        tokens, context, squares = 0, 0, 0
        for num_new, num_cached in chunks:
            tokens += num_new
            context += num_new + num_cached
            squares += num_new * (num_new + 2 * num_cached)
        step_s = terms.base_s + terms.per_token_s * tokens + terms.per_square_s * squares
        step_s = step_s if step_s > terms.floor_s else terms.floor_s
        extra_s = self._prefill_extra_s + self._engine_per_token_s * context
        return Estimate(step_s + extra_s, Source.FITTED)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        regimes = self._decode
        terms = regimes.small if batch < regimes.threshold else regimes.large
        base_s = terms.base_s + terms.per_sequence_s * batch + self._engine_s
        return StepLine(base_s, terms.per_token_s + self._engine_per_token_s, inf, Source.FITTED)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        if batch == 0:
            return self.prefill(chunks)
        decode_s = self.decode(batch, context_tokens).seconds(context_tokens)
        if not chunks:
            return Estimate(decode_s, Source.FITTED)
        return Estimate(max(decode_s, self._mixed_s(chunks, batch, context_tokens)), Source.FITTED)

    def transfer(self, num_tokens: int) -> Estimate:
        if self._pull is None:
            raise ProfileError("these coefficients know no link to pull over: name one")
        return Estimate(self._pull.seconds(num_tokens), Source.FITTED)

    def _mixed_s(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> float:
        """The decoded rows join the prompts' in every product; their attention comes on top."""
        per_token_s = self._decode.terms(batch).per_token_s + self._engine_per_token_s
        rows_s = self._prefill.per_token_s * batch
        sum_s = self.prefill(chunks).seconds + rows_s + per_token_s * context_tokens
        if self.fit.interaction is None:
            return UNMEASURED_MIX * sum_s
        tokens = sum(chunk.num_new for chunk in chunks)
        return sum_s + self.fit.interaction.seconds(tokens, batch) / self.num_stages

    def _bent_prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        """With a negative square term a prompt's curve turns down somewhere: level from there."""
        terms = self._prefill
        turn = -terms.per_token_s / (2 * terms.per_square_s)

        def whole_s(length: float) -> float:
            length = min(length, turn)
            return (terms.per_token_s + terms.per_square_s * length) * length

        parts_s = [whole_s(c.num_new + c.num_cached) - whole_s(c.num_cached) for c in chunks]
        context = sum(c.num_new + c.num_cached for c in chunks)
        step_s = max(terms.floor_s, terms.base_s + sum(parts_s))
        extra_s = self._prefill_extra_s + self._engine_per_token_s * context
        return Estimate(step_s + extra_s, Source.FITTED)
