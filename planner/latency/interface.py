"""What the simulator asks of a latency model, whatever stands behind it.

A model belongs to one instance shape: one (model, device, tp, pp). It knows one *stage*: how long
a batch occupies each of the `num_stages` pipeline stages in the mean. A batch passes through all of
them, so its latency is `num_stages` times that, while the next batch may follow behind it, at the
distance of the slowest stage: `slowest` says how much longer that one takes.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol


class Source(StrEnum):
    """Where an answer comes from; the best one available answers."""

    MEASURED = "measured"
    FITTED = "fitted"
    ROOFLINE = "roofline"


class Chunk(NamedTuple):
    """Tokens of one prompt that a step computes, after those that it finds in the cache."""

    num_new: int
    num_cached: int = 0


class Slowest(NamedTuple):
    """The slowest stage's time over the mean one's, by phase: 1 where stages are equal."""

    prefill: float = 1.0
    decode: float = 1.0


EQUAL = Slowest()


class Estimate(NamedTuple):
    """Seconds, and who says so."""

    seconds: float
    source: Source


class StepLine(NamedTuple):
    """One decode step of an unchanged batch, as its context grows by what it decodes.

    A step takes `base_s + per_token_s * context_tokens` for every context (summed over the batch)
    from the one that was asked for to `until_tokens`; beyond that, ask again. So many steps can be
    added up in closed form, and skipping steps gives the same times as taking them.
    """

    base_s: float
    per_token_s: float
    until_tokens: float
    source: Source

    def seconds(self, context_tokens: float) -> float:
        return self.base_s + self.per_token_s * context_tokens


class LatencyModel(Protocol):
    """Step times of one instance shape, per pipeline stage, in seconds."""

    @property
    def num_stages(self) -> int: ...

    @property
    def slowest(self) -> Slowest: ...

    @property
    def num_devices(self) -> int:
        """tp * pp."""
        ...

    @property
    def source(self) -> Source:
        """The best source among those that answer."""
        ...

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        """A step that computes these prompts (or parts of them), and nothing else.

        Never shorter for more tokens. `chunks` is not empty.
        """
        ...

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        """A step that draws one token for each of `batch` sequences.

        `context_tokens` is the sum of their lengths, the new tokens included.
        """
        ...

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        """A step that does both at once, as a colocated instance with chunked prefill does."""
        ...

    def transfer(self, num_tokens: int) -> Estimate:
        """A pull of one prompt's keys and values, by a decode instance of this shape."""
        ...


def decode_pace(model: LatencyModel, num_batches: int) -> float:
    """How much longer a step takes where so many micro-batches follow each other: all of them
    pass the slowest stage before the first one comes to it again."""
    return max(1.0, model.slowest.decode * num_batches / model.num_stages)
