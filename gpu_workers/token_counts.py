"""Which tokens each sequence has, counted on as they come.

Penalties look at all of a sequence's tokens in every step. Counted anew each time, those of a batch
of long prompts take the host longer than the step takes the device.
"""

from collections.abc import Sequence

import numpy as np

from gpu_workers.sampler import Draw
from gpu_workers.sequence_table import IntArray

KEPT_ROUNDS = 16  # without being asked for; whoever comes later is counted anew


class TokenCounts:
    """Of the sequences whose draws were asked for lately."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Counted] = {}  # by the identity of their list of tokens
        self._round = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def begin_round(self) -> None:
        """What follows is about another step: forget those that no step asks for any more."""
        self._round += 1
        oldest = self._round - KEPT_ROUNDS
        self._sequences = {k: s for k, s in self._sequences.items() if s.asked_in >= oldest}

    def of(self, draw: Draw) -> tuple[IntArray, IntArray]:
        """Every token of prompt and output once, and how often it is in the output. Not to be
        changed, and valid until the sequence is asked for again."""
        key = id(draw.tokens)
        counted = self._sequences.get(key)
        if counted is None or not counted.is_of(draw):
            counted = self._sequences[key] = _Counted(draw.tokens, draw.num_prompt)
        counted.asked_in = self._round
        counted.count_on()
        return counted.ids, counted.times


class _Counted:
    """One sequence, whose list of tokens only ever grows."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self.asked_in = 0
        self._tokens, self._num_prompt = tokens, num_prompt
        self._places = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
        self._ids = np.fromiter(self._places, np.int64, len(self._places))
        self._times = np.zeros(len(self._ids), dtype=np.int64)
        self._num_counted = num_prompt

    @property
    def ids(self) -> IntArray:
        return self._ids[: len(self._places)]

    @property
    def times(self) -> IntArray:
        return self._times[: len(self._places)]

    def is_of(self, draw: Draw) -> bool:
        """Whether it is about that very list, and not about one that was there before."""
        is_same = self._tokens is draw.tokens and self._num_prompt == draw.num_prompt
        return is_same and len(draw.tokens) >= self._num_counted

    def count_on(self) -> None:
        for token in self._tokens[self._num_counted :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
            self._times[place] += 1
        self._num_counted = len(self._tokens)

    def _grow(self) -> None:
        more = np.zeros(max(len(self._ids), 64), dtype=np.int64)
        self._ids = np.concatenate((self._ids, more))
        self._times = np.concatenate((self._times, more))
