"""Has the pattern shifted? A cumulative sum (Page 1954) of each figure's change against the plan.

The sum is of logarithms, less a dead band: inside the band, widened by the window's own standard
error, it falls back to zero, so that noise and the daily drift around the plan add up to nothing.
One window adds at most half of what makes a shift: a single burst, however high, is forgotten
again, and two windows confirm. A change just beyond the band is told later than a large one.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

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
        since_s: start of the window from which on the sum has been above zero (Page's estimate of
            when it changed).
    """

    figure: Figure
    planned: float
    observed: float
    evidence: float
    since_s: float

    @property
    def factor(self) -> float:
        return self.observed / self.planned

    def told(self) -> str:
        return f"{self.figure} {100 * (self.factor - 1):+.0f} % against the plan"


class _Reading(NamedTuple):
    """A window's logarithm of a figure, and its standard error."""

    start_s: float
    log: float
    error: float


class _Sum(NamedTuple):
    """A one-sided cumulative sum, and when it last left zero."""

    value: float = 0.0
    since_s: float = 0.0

    def plus(self, step: float, start_s: float) -> "_Sum":
        value = max(self.value + step, 0.0)
        return _Sum(value, self.since_s if self.value > 0 else start_s)


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
        total = _larger_sum(readings, math.log(plan), math.log1p(band), rules)
        evidence = total.value / rules.confirm + 1e-9
        if evidence >= 1:
            last = [reading.log for reading in readings[-2:]]
            observed = math.exp(sum(last) / len(last))
            found.append(Shift(figure, plan, observed, evidence, total.since_s))
    return tuple(found)


def changed_s(found: Sequence[Shift]) -> float | None:
    """When the latest of them began: what is older is of another pattern."""
    return max((shift.since_s for shift in found), default=None)


def _larger_sum(readings: Sequence[_Reading], plan: float, band: float, rules: Rules) -> _Sum:
    """Of the two one-sided ones."""
    up = down = _Sum()
    most = rules.confirm / 2
    for start_s, log, error in readings:
        change, allowed = log - plan, band + rules.noise * error
        up = up.plus(min(change - allowed, most), start_s)
        down = down.plus(min(-change - allowed, most), start_s)
    return max(up, down)


def _rate(window: Window) -> _Reading:
    return _Reading(window.start_s, window.log_rate, window.rate_error)


def _mean(window: Window, lengths: LengthStats | None) -> _Reading | None:
    if lengths is None:
        return None
    error = lengths.cv / math.sqrt(window.count)
    return _Reading(window.start_s, math.log(lengths.mean), error)


def _cv(window: Window) -> _Reading | None:
    """Of Gamma gaps with CV c the logarithm of a sample's CV varies by (1 + c^2) / 2n (the delta
    method on their first four moments); for c = 1 that is the 1/n of exponential gaps."""
    cv = window.gap_cv
    if not cv:
        return None
    error = math.sqrt((1 + cv**2) / (2 * window.count))
    return _Reading(window.start_s, math.log(cv), error)
