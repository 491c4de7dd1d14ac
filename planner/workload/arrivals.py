"""When requests arrive, at each process's own rate; the workload scales the times to another.

The same seed gives the same unit-rate gaps whatever the rate, and the first n times of a longer
draw are those of a shorter one. Scaling times keeps the gaps' CV; a drift of the rate is
stretched with them, so at twice the rate it passes twice as fast.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self

import numpy as np

from planner.workload.arrival_fit import ArrivalFit
from planner.workload.gap_families import GapFamily
from planner.workload.requests import Floats, Requests
from planner.workload.rows import RowPicks
from planner.workload.streams import Stream, generator


class Arrivals(Protocol):
    """A stream of arrival times."""

    @property
    def own_rate(self) -> float | None:
        """Requests per second of the trace behind it, infinite where all arrive at once.

        None without a trace: then `times` has the rate 1.
        """
        ...

    def times(self, num: int, seed: int) -> Floats:
        """Seconds from the start at its own rate, never falling, float64[num]."""
        ...


@dataclass(frozen=True)
class Evenly:
    """One request a second on the second."""

    own_rate: None = field(default=None, init=False)

    def times(self, num: int, seed: int) -> Floats:
        return np.arange(1, num + 1, dtype=np.float64)


@dataclass(frozen=True)
class Renewal:
    """Independent gaps of mean 1 s. Gamma gaps of CV c have the shape 1/c^2; Poisson is c = 1."""

    family: GapFamily
    shape: float
    own_rate: None = field(default=None, init=False)

    @classmethod
    def with_cv(cls, cv: float) -> Self:
        return cls(GapFamily.GAMMA, 1 / cv**2)

    def times(self, num: int, seed: int) -> Floats:
        return np.cumsum(self.family.draw(self.shape, num, generator(seed, Stream.GAPS)))


@dataclass(frozen=True)
class Modulated:
    """The fitted process by time rescaling: t = Lambda^-1(cumsum of unit-mean gaps).

    A run starts at a random point of the trace's span, so that short runs see all of it in the
    mean, and passes from its end to its start.
    """

    fit: ArrivalFit

    @property
    def own_rate(self) -> float:
        return self.fit.rate

    def times(self, num: int, seed: int) -> Floats:
        best = self.fit.gaps[0]
        edges_s, cumulative = self.fit.cumulative()
        start_s = float(generator(seed, Stream.PHASE).random()) * self.fit.span_s
        due = np.interp(start_s, edges_s, cumulative) + np.cumsum(
            best.family.draw(best.shape, num, generator(seed, Stream.GAPS))
        )
        num_spans, within = np.divmod(due, cumulative[-1])
        times_s = num_spans * self.fit.span_s + np.interp(within, cumulative, edges_s) - start_s
        return np.maximum.accumulate(np.maximum(times_s, 0.0))


@dataclass(frozen=True, eq=False)
class Replay:
    """The trace's own times; once they are used up, again from the start, one mean gap later."""

    trace: Requests

    @property
    def own_rate(self) -> float:
        return self.trace.rate

    def times(self, num: int, seed: int) -> Floats:
        own_s = self.trace.arrival_s
        num_passes, rows = np.divmod(np.arange(num), len(own_s))
        if num <= len(own_s):
            return own_s[rows]
        period_s = float(own_s[-1] - own_s[0]) + 1 / self.trace.rate
        return own_s[rows] + num_passes * period_s


@dataclass(frozen=True, eq=False)
class Resampled:
    """Gaps of the rows that `picks` takes: those whose lengths the same picks take."""

    trace: Requests
    picks: RowPicks

    @property
    def own_rate(self) -> float:
        return self.trace.rate

    @cached_property
    def gaps_s(self) -> Floats:
        """Before each request; the first one's is not known and stands at the mean."""
        return np.diff(self.trace.arrival_s, prepend=self.trace.arrival_s[0] - 1 / self.own_rate)

    def times(self, num: int, seed: int) -> Floats:
        return np.cumsum(self.gaps_s[self.picks.pick(num, len(self.trace), seed)])
