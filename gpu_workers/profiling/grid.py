"""Which steps and pulls `distserve profile` measures, and which of them have room.

Pure. Costs of prefill and decode in one step do not add up, so mixed steps are measured on a small
grid of their own; chunks alone (batch 0) are part of it, since a chunk attends to what is cached.
"""

from itertools import product
from typing import NamedTuple

from ipc.kv_layout import blocks_for

PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PROMPTS_TOGETHER = (2, 4, 8)
PACKED_TOKENS = (32, 128)  # length of each prompt when several are prefilled together
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNK_TOKENS = (32, 128, 512)
CACHED_TOKENS = (0, 256, 1024)  # before a chunk: nothing, and the longest other that has room
MIXED_BATCHES = (1, 8, 32)
MIXED_CONTEXTS = (128, 512, 1024)  # beside a chunk: the shortest, and the longest that has room
PULL_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096)


class StepShape(NamedTuple):
    """A step: `num_prompts` times `num_new` tokens, each after `num_cached` that are there
    already, beside `batch` decodes of `context` tokens each, the drawn one's input included."""

    num_prompts: int = 0
    num_new: int = 0
    num_cached: int = 0
    batch: int = 0
    context: int = 0


class Room(NamedTuple):
    """What a step may take: the pool, and the largest figures that are asked for."""

    num_blocks: int
    block_size: int
    max_context: int
    max_batch: int
    max_step_tokens: int  # new tokens of one step: what bounds the time of the longest

    def holds(self, step: StepShape) -> bool:
        return (
            max(step.num_cached + step.num_new, step.context) <= self.max_context
            and step.batch <= self.max_batch
            and step.num_prompts * step.num_new <= self.max_step_tokens
            and self.times(step) >= 1
        )

    def times(self, step: StepShape) -> int:
        """How many such steps have blocks of their own at the same time."""
        prompt = step.num_cached + step.num_new
        blocks = step.num_prompts * blocks_for(prompt, self.block_size)
        blocks += step.batch * blocks_for(step.context, self.block_size)
        return self.num_blocks // blocks

    def within(self, steps: list[StepShape]) -> list[StepShape]:
        return [step for step in steps if self.holds(step)]


class Grid(NamedTuple):
    """All that is measured."""

    prefill: list[StepShape]
    decode: list[StepShape]
    mixed: list[StepShape]
    pulls: list[int]  # tokens of each

    @classmethod
    def of(cls, room: Room) -> "Grid":
        return cls(prefill_steps(room), decode_steps(room), mixed_steps(room), pull_sizes(room))

    @property
    def steps(self) -> list[StepShape]:
        return [*self.prefill, *self.decode, *self.mixed]

    @property
    def single(self) -> list[StepShape]:
        """Prompts that are prefilled alone."""
        return [step for step in self.prefill if step.num_prompts == 1]


def prefill_steps(room: Room) -> list[StepShape]:
    single = [StepShape(1, tokens) for tokens in PROMPT_TOKENS]
    packed = [StepShape(number, tokens) for tokens in PACKED_TOKENS for number in PROMPTS_TOGETHER]
    return room.within(single + packed)


def decode_steps(room: Room) -> list[StepShape]:
    grid = [StepShape(batch=batch, context=tokens) for tokens in CONTEXTS for batch in BATCHES]
    return room.within(grid)


def mixed_steps(room: Room) -> list[StepShape]:
    """Chunks with and without cached tokens beside decodes, and alone with cached tokens.

    A chunk alone with nothing cached is a prefill step and measured as one, so it is not repeated.
    """
    longest = min(room.max_context // 2, room.max_step_tokens)
    chunks = [tokens for tokens in CHUNK_TOKENS if tokens <= longest]
    beyond = room.max_context - max(chunks, default=0)
    cached = _ends([tokens for tokens in CACHED_TOKENS if tokens <= beyond])
    contexts = _ends([tokens for tokens in MIXED_CONTEXTS if tokens <= room.max_context])
    alone = [StepShape(1, new, old) for new, old in product(chunks, cached) if old]
    beside = [
        StepShape(1, new, old, batch, context)
        for new, old, batch, context in product(chunks, cached, MIXED_BATCHES, contexts)
    ]
    return room.within(alone + beside)


def pull_sizes(room: Room) -> list[int]:
    """Lengths of the prompts that are pulled."""
    longest = min(room.max_context, room.num_blocks * room.block_size)
    return [tokens for tokens in PULL_TOKENS if tokens <= longest]


def _ends(values: list[int]) -> list[int]:
    return sorted({*values[:1], *values[-1:]})
