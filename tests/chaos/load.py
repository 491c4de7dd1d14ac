"""A mixed load by seed: of all lengths, with choices and stop strings, and clients that leave."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from daemon.generation import GenerationSpec
from ipc.vocabulary import FinishReason, SamplingParams
from tests.chaos.memory_engine import letter
from tests.end_to_end.town import Client

MAX_PROMPT, MAX_OUTPUT = 40, 16


class Visit(NamedTuple):
    """One call: what it asks for, how many ticks after the one before, when its client leaves."""

    specs: tuple[GenerationSpec, ...]
    gap: int
    leaves_after: int | None


def visits(seed: int, count: int) -> list[Visit]:
    dice = random.Random(seed)
    return [_visit(dice) for _ in range(count)]


def _visit(dice: random.Random) -> Visit:
    specs = tuple(_spec(dice) for _ in range(dice.choice((1, 1, 1, 2))))
    leaves_after = dice.randrange(200) if dice.random() < 0.25 else None
    return Visit(specs, dice.randrange(12), leaves_after)


def _spec(dice: random.Random) -> GenerationSpec:
    prompt = [dice.randrange(200) for _ in range(dice.randint(1, MAX_PROMPT))]
    max_tokens = dice.randint(1, MAX_OUTPUT)
    stop: tuple[str, ...] = ()
    if dice.random() < 0.3:  # what the first choice is about to say
        start = dice.randrange(max_tokens)
        stop = (bytes(letter(prompt, 0, start + i) for i in range(dice.choice((1, 2)))).decode(),)
    sampling = SamplingParams(max_tokens=max_tokens, seed=dice.randrange(1000))
    num_choices = dice.choice((1, 1, 2, 3))
    return GenerationSpec(
        prompt=tuple(prompt), sampling=sampling, num_choices=num_choices, stop=stop
    )


class Answer(NamedTuple):
    """All that a client has of one choice."""

    token_ids: tuple[int, ...]
    text: str
    endings: tuple[FinishReason, ...]
    num_logprobs: int

    def begins(self, whole: "Answer") -> bool:
        """Whether it may be the first part of another, of one whose client left meanwhile."""
        return (
            self.token_ids == whole.token_ids[: len(self.token_ids)]
            and whole.text.startswith(self.text)
            and len(self.endings) <= 1
        )


def answers_of(client: Client) -> Iterator[Answer]:
    for choice in range(sum(spec.num_choices for spec in client.specs)):
        deltas = [delta for delta in client.deltas if delta.choice == choice]
        yield Answer(
            tuple(token for delta in deltas for token in delta.token_ids),
            "".join(delta.text for delta in deltas),
            tuple(delta.finished for delta in deltas if delta.finished is not None),
            sum(len(delta.logprobs or ()) for delta in deltas),
        )
