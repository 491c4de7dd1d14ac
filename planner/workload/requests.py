"""A workload as simulator and bench take it: when requests arrive, and how long they are."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Requests:
    """N requests in order of arrival, one entry of each array for each.

    Args:
        arrival_s: seconds from the start, never falling, float64[N].
        input_tokens: prompt lengths, at least 1, int64[N].
        output_tokens: tokens drawn, the first one included, at least 1, int64[N].
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Mean arrivals per second over the span."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span_s if span_s > 0 else float("inf")

    def stretched(self, factor: float) -> Self:
        """The same requests with all times multiplied: another rate, the same burstiness."""
        return type(self)(self.arrival_s * factor, self.input_tokens, self.output_tokens)

    def first(self, count: int) -> Self:
        return self.part(slice(count))

    def part(self, rows: slice | Bools) -> Self:
        """Some of them, in their order."""
        return type(self)(self.arrival_s[rows], self.input_tokens[rows], self.output_tokens[rows])
