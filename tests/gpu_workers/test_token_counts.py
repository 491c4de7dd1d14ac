"""Counting a sequence's tokens as they come gives what counting all of them gives."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu_workers.sampler import Draw
from gpu_workers.token_counts import KEPT_ROUNDS, TokenCounts
from ipc.vocabulary import SamplingParams

SAMPLING = SamplingParams(max_tokens=64, seed=0)


def draw(tokens: Sequence[int], num_prompt: int) -> Draw:
    return Draw(0, SAMPLING, 0, tokens, num_prompt)


def counted(counts: TokenCounts, tokens: Sequence[int], num_prompt: int) -> dict[int, int]:
    ids, times = counts.of(draw(tokens, num_prompt))
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


def expected(tokens: Sequence[int], num_prompt: int) -> dict[int, int]:
    output = Counter(tokens[num_prompt:])
    return {token: output[token] for token in tokens}


def test_tokens_counted_as_they_come_are_those_counted_at_once() -> None:
    numbers = random.Random(0)
    counts = TokenCounts()
    sequences = [[numbers.randrange(300) for _ in range(n)] for n in (1, 40, 700)]
    prompts = [len(tokens) for tokens in sequences]
    for _ in range(200):
        counts.begin_round()
        for tokens, num_prompt in zip(sequences, prompts, strict=True):
            assert counted(counts, tokens, num_prompt) == expected(tokens, num_prompt)
            tokens.extend(numbers.randrange(400) for _ in range(numbers.choice((0, 1, 1, 3))))


def test_a_sequence_that_was_prefilled_again_brings_its_output_along() -> None:
    tokens = [5, 6, 5, 7, 7]
    assert counted(TokenCounts(), tokens, 2) == {5: 1, 6: 0, 7: 2}


class Watched(list[int]):
    """Tells from where on it is read."""

    first = 0

    def __getitem__(self, index: Any) -> Any:
        self.first = index.start
        return super().__getitem__(index)


def test_only_what_is_new_is_looked_at() -> None:
    tokens = Watched(range(1000))
    counts = TokenCounts()
    counts.of(draw(tokens, 1000))
    tokens.append(3)
    counts.of(draw(tokens, 1000))
    assert tokens.first == 1000
    assert counted(counts, tokens, 1000)[3] == 1
    assert tokens.first == 1001


def test_another_sequence_at_the_same_place_in_memory_is_another() -> None:
    counts = TokenCounts()
    tokens = [1, 2, 3]
    counts.of(draw(tokens, 2))
    assert counted(counts, tokens, 3) == {1: 0, 2: 0, 3: 0}  # another prompt of the same tokens
    del tokens[1:]
    assert counted(counts, tokens, 1) == {1: 0}


def test_who_is_asked_for_no_more_is_forgotten() -> None:
    counts = TokenCounts()
    stays, goes = [1], [2]
    counts.begin_round()
    counts.of(draw(stays, 1))
    counts.of(draw(goes, 1))
    for _ in range(KEPT_ROUNDS):
        counts.begin_round()
        counts.of(draw(stays, 1))
    assert len(counts) == 2
    counts.begin_round()
    assert len(counts) == 1
