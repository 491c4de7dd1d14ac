"""Which rows of a table or a trace a run takes: in order, independently, or in blocks.

A trace's gaps and lengths picked by the same rule and seed are the same rows, so what hangs
together in the trace, (gap, input, output), stays together.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.workload.requests import Ints
from planner.workload.streams import Stream, generator


class RowPicks(Protocol):
    """Row indices of a table of `num_rows`, the first of them the same however many are asked."""

    def pick(self, num: int, num_rows: int, seed: int) -> Ints: ...


@dataclass(frozen=True)
class InOrder:
    """As they stand; from the start again when they are used up."""

    def pick(self, num: int, num_rows: int, seed: int) -> Ints:
        return np.arange(num, dtype=np.int64) % num_rows


@dataclass(frozen=True)
class Independent:
    """With replacement: an input and its output stay together, neighbours do not."""

    def pick(self, num: int, num_rows: int, seed: int) -> Ints:
        return generator(seed, Stream.ROWS).integers(0, num_rows, num)


@dataclass(frozen=True)
class Blocks:
    """Runs of `length` neighbours from random places: a moving-block bootstrap.

    Circular (Politis and Romano 1992): a block that passes the end goes on at the start, so
    every row is picked equally often in the mean.
    """

    length: int

    def pick(self, num: int, num_rows: int, seed: int) -> Ints:
        starts = generator(seed, Stream.ROWS).integers(0, num_rows, -(-num // self.length))
        rows = starts[:, None] + np.arange(self.length, dtype=np.int64)  # (blocks, length)
        return (rows.reshape(-1) % num_rows)[:num]
