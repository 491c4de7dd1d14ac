"""Has the pattern shifted? A cumulative sum (Page 1954) of each figure's change against the plan.

The sum is of logarithms, less a dead band: inside the band, widened by the window's own standard
error, it falls back to zero, so that noise and the daily drift around the plan add up to nothing.
One window adds at most half of what makes a shift: a single burst, however high, is forgotten
again, and two windows confirm. A change just beyond the band is told later than a large one.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from planner.replan.rules import Rules
from planner.replan.window import LengthStats, Pattern, Window


class Figure(StrEnum):
    """What is watched."""

    RATE = "rate"
    INPUT = "mean input"
    OUTPUT = "mean output"
    CV = "CV of the gaps"


class Shift(msgspec.Struct, frozen=True):
    """A confirmed change of one figure.

    Args:
        planned, observed: the last two windows' geometric mean against what was planned for.
        evidence: the cumulative sum; 1 is where it is confirmed.
    """

    figure: Figure
    planned: float
    observed: float
    evidence: float

    @property
    def factor(self) -> float:
        return self.observed / self.planned

    def told(self) -> str:
        return f"{self.figure} {100 * (self.factor - 1):+.0f} % against the plan"


class _Reading(msgspec.Struct, frozen=True):
    """A window's logarithm of a figure, and its standard error."""

    log: float
    error: float


_Read = Callable[[Window], _Reading | None]


def shifts(windows: Sequence[Window], planned: Pattern, rules: Rules) -> tuple[Shift, ...]:
    """The figures that have shifted, from the windows since the plan was made."""
    watched: tuple[tuple[Figure, float | None, float, _Read], ...] = (
        (Figure.RATE, planned.rate, rules.rate_band, _rate),
        (Figure.INPUT, planned.mean_input, rules.length_band, lambda w: _mean(w, w.inputs)),
        (Figure.OUTPUT, planned.mean_output, rules.length_band, lambda w: _mean(w, w.outputs)),
        (Figure.CV, planned.gap_cv, rules.cv_band, _cv),
    )
    found: list[Shift] = []
    for figure, plan, band, read in watched:
        if plan is None:
            continue
        readings = [reading for w in windows if (reading := read(w)) is not None]
        evidence = _evidence(readings, math.log(plan), math.log1p(band), rules)
        if evidence >= 1:
            last = [reading.log for reading in readings[-2:]]
            found.append(Shift(figure, plan, math.exp(sum(last) / len(last)), evidence))
    return tuple(found)


def _evidence(readings: Sequence[_Reading], plan: float, band: float, rules: Rules) -> float:
    """The larger of the two one-sided sums, as a multiple of what confirms."""
    up = down = 0.0
    most = rules.confirm / 2
    for reading in readings:
        change, allowed = reading.log - plan, band + rules.noise * reading.error
        up = max(up + min(change - allowed, most), 0.0)
        down = max(down + min(-change - allowed, most), 0.0)
    return max(up, down) / rules.confirm + 1e-9


def _rate(window: Window) -> _Reading:
    return _Reading(window.log_rate, window.rate_error)


def _mean(window: Window, lengths: LengthStats | None) -> _Reading | None:
    if lengths is None:
        return None
    return _Reading(math.log(lengths.mean), lengths.cv / math.sqrt(window.count))


def _cv(window: Window) -> _Reading | None:
    """Of Gamma gaps with CV c the logarithm of a sample's CV varies by (1 + c^2) / 2n (the delta
    method on their first four moments); for c = 1 that is the 1/n of exponential gaps."""
    cv = window.gap_cv
    if not cv:
        return None
    return _Reading(math.log(cv), math.sqrt((1 + cv**2) / (2 * window.count)))
