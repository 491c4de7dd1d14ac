"""How long requests are: rows of a table, or distributions given by parameters.

Input and output are drawn together wherever they were observed together. Two adjustments apply
to every kind: all lengths scaled by a factor (a sensitivity of +-10 %), and a limit on the sum of
input and output, above which a request is dropped or its prompt clipped.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from planner.errors import WorkloadError
from planner.workload.requests import Bools, Floats, Ints
from planner.workload.rows import RowPicks
from planner.workload.streams import Stream, generator
from planner.workload.trace_file import MAX_TOKENS

# Requests are drawn so many at a time where some may be dropped; a fixed number, or the first
# requests of a longer draw would not be those of a shorter one.
CHUNK = 4096
# Synthetic lengths of which fewer than this share fit under the limit are refused.
MIN_KEPT = 0.01


class Overlong(StrEnum):
    """What happens to a request above the limit."""

    DROP = "drop"
    CLIP = "clip"


@dataclass(frozen=True)
class LengthRules:
    """Scale first, then limit.

    Args:
        scale: every length times this, rounded, at least 1.
        max_total_tokens: longest input + output, as a model's positions have it (OPT: 2,048).
        overlong: `drop` leaves the request out, as DistServe does with ShareGPT; `clip` shortens
            the prompt until the sum fits, as it does with LongBench (and, where the output alone
            fills the limit, the output to one below it).
    """

    scale: float = 1.0
    max_total_tokens: int | None = None
    overlong: Overlong = Overlong.DROP

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf"):
            raise WorkloadError(f"the length scale must be above zero, not {self.scale:g}")
        if self.scale > MAX_TOKENS:
            raise WorkloadError(
                f"the length scale must be at most {MAX_TOKENS:g}, not {self.scale:g}"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise WorkloadError(
                "the limit on input + output must be at least 2 tokens, "
                f"not {self.max_total_tokens}"
            )

    def apply(self, input_tokens: Ints, output_tokens: Ints) -> tuple[Ints, Ints, Bools]:
        """Adjusted lengths of all requests, and which of them stay."""
        inputs, outputs = (self._scaled(tokens) for tokens in (input_tokens, output_tokens))
        if self.max_total_tokens is None:
            return inputs, outputs, np.ones(len(inputs), np.bool_)
        if self.overlong is Overlong.DROP:
            return inputs, outputs, inputs + outputs <= self.max_total_tokens
        outputs = np.minimum(outputs, self.max_total_tokens - 1)
        inputs = np.minimum(inputs, self.max_total_tokens - outputs)
        return inputs, outputs, np.ones(len(inputs), np.bool_)

    def _scaled(self, tokens: Ints) -> Ints:
        if self.scale == 1.0:
            return tokens
        return whole_tokens(np.asarray(tokens * self.scale, np.float64))


def whole_tokens(lengths: Floats) -> Ints:
    """Rounded to whole tokens, at least 1."""
    return np.asarray(np.clip(np.rint(lengths), 1, MAX_TOKENS), np.int64)


class Lengths(Protocol):
    """Pairs of input and output lengths."""

    def draw(self, num: int, seed: int) -> tuple[Ints, Ints]:
        """int64[num] each; the first n of a longer draw are the draw of n."""
        ...


@dataclass(frozen=True, eq=False)
class TableLengths:
    """Rows of observed pairs."""

    input_tokens: Ints
    output_tokens: Ints
    picks: RowPicks

    def draw(self, num: int, seed: int) -> tuple[Ints, Ints]:
        rows = self.picks.pick(num, len(self.input_tokens), seed)
        return self.input_tokens[rows], self.output_tokens[rows]


class Marginal(Protocol):
    """The distribution of one of the two lengths."""

    def draw(self, num: int, random: np.random.Generator) -> Ints: ...


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, num: int, random: np.random.Generator) -> Ints:
        return np.full(num, self.tokens, np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every whole number from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, num: int, random: np.random.Generator) -> Ints:
        return random.integers(self.low, self.high, num, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    """exp(N(log median, log_sd)), rounded, at least 1."""

    median: int
    log_sd: float

    def draw(self, num: int, random: np.random.Generator) -> Ints:
        tokens = self.median * np.exp(self.log_sd * random.standard_normal(num))
        return whole_tokens(tokens)


@dataclass(frozen=True)
class SyntheticLengths:
    """Input and output independent of each other. Dropped requests are drawn again."""

    inputs: Marginal
    outputs: Marginal
    rules: LengthRules = field(default_factory=LengthRules)

    def draw(self, num: int, seed: int) -> tuple[Ints, Ints]:
        streams = (generator(seed, Stream.INPUT), generator(seed, Stream.OUTPUT))
        chunks: list[tuple[Ints, Ints]] = []
        num_kept = 0
        while num_kept < num:
            chunks.append(self._chunk(*streams))
            num_kept += len(chunks[-1][0])
            if num_kept < MIN_KEPT * CHUNK * len(chunks):
                raise WorkloadError(
                    "hardly any request of these lengths fits under the limit of "
                    f"{self.rules.max_total_tokens} tokens"
                )
        inputs, outputs = (np.concatenate(side)[:num] for side in zip(*chunks, strict=True))
        return inputs, outputs

    def _chunk(
        self, input_random: np.random.Generator, output_random: np.random.Generator
    ) -> tuple[Ints, Ints]:
        inputs, outputs, kept = self.rules.apply(
            self.inputs.draw(CHUNK, input_random), self.outputs.draw(CHUNK, output_random)
        )
        return inputs[kept], outputs[kept]
