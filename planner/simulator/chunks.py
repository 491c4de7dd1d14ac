"""Prompts that a mixed instance computes in chunks, and how a step's budget is dealt out."""

from collections.abc import Sequence

from planner.latency.interface import Chunk
from planner.simulator.passage import Passage


class Started:
    """A prompt that a lane computes in chunks."""

    __slots__ = ("is_fresh", "num_computed", "num_new", "passage")

    def __init__(self, passage: Passage, num_computed: int = 0) -> None:
        self.passage = passage
        self.num_computed = num_computed
        self.num_new = 0  # in the running step
        self.is_fresh = False  # the last step computed a chunk of it

    @property
    def remaining(self) -> int:
        return self.passage.num_tokens - self.num_computed


def deal_out(prompts: Sequence[Started], budget: int) -> list[Chunk]:
    """Deal the budget out among prompts that have begun."""
    sizes = chunk_sizes([started.remaining for started in prompts], budget=budget)
    for started, num_new in zip(prompts, sizes, strict=False):
        started.num_new = num_new
    return [Chunk(each.num_new, each.num_computed) for each in prompts if each.num_new]


def chunk_sizes(remaining: Sequence[int], *, budget: int) -> list[int]:
    """How many tokens of each prompt that has begun, in order, fill a chunked step's budget."""
    sizes: list[int] = []
    for num_tokens in remaining:
        if budget <= 0:
            break
        sizes.append(min(num_tokens, budget))
        budget -= sizes[-1]
    return sizes
