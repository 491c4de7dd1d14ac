"""The same workload, a little different: to see how much the answer hangs on it."""

from dataclasses import dataclass, replace

import numpy as np

from planner.workload.arrivals import Arrivals
from planner.workload.lengths import Lengths, whole_tokens
from planner.workload.requests import Floats, Ints
from planner.workload.workload import Workload

NOISE = 1_000  # key of a random stream of its own below the seed


@dataclass(frozen=True)
class Variation:
    """All lengths multiplied; the arrivals' coefficient of variation multiplied."""

    lengths: float = 1.0
    cv: float = 1.0


AS_IT_IS = Variation()


@dataclass(frozen=True)
class ScaledLengths:
    """Another workload's lengths, inputs and outputs each times a factor."""

    lengths: Lengths
    of_inputs: float
    of_outputs: float

    def draw(self, num: int, seed: int) -> tuple[Ints, Ints]:
        inputs, outputs = self.lengths.draw(num, seed)
        return _scaled(inputs, self.of_inputs), _scaled(outputs, self.of_outputs)


@dataclass(frozen=True)
class UnsteadyArrivals:
    """Each gap times independent Gamma noise of mean 1, so that the CV grows by the factor.

    Of a product of independent variables (1 + CV^2) multiplies, whatever the gaps come from.
    """

    arrivals: Arrivals
    factor: float

    @property
    def own_rate(self) -> float | None:
        return self.arrivals.own_rate

    def times(self, num: int, seed: int) -> Floats:
        times_s = self.arrivals.times(num, seed)
        gaps_s = np.diff(times_s, prepend=0.0)
        mean_s = float(gaps_s.mean())
        square = float(gaps_s.var()) / mean_s**2 if mean_s > 0 else 0.0
        noise_square = (self.factor**2 - 1) * square / (1 + square)
        if noise_square <= 0:
            return times_s
        random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(NOISE,)))
        noise = random.gamma(1 / noise_square, noise_square, num)
        return np.cumsum(gaps_s * noise)


def varied(workload: Workload, variation: Variation) -> Workload:
    """The workload with the variation's factors."""
    lengths, arrivals = workload.lengths, workload.arrivals
    if variation.lengths != 1.0:
        lengths = ScaledLengths(lengths, variation.lengths, variation.lengths)
    if variation.cv != 1.0:
        arrivals = UnsteadyArrivals(arrivals, variation.cv)
    return replace(workload, lengths=lengths, arrivals=arrivals)


def _scaled(tokens: Ints, factor: float) -> Ints:
    """At least one token each."""
    return whole_tokens(np.asarray(tokens * factor, np.float64))
