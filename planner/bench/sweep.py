"""Goodput from live runs: which rate to try next, and where the attainment crosses its target.

Pure: runs are made elsewhere. Attainment falls with the rate, measurements need not; they are
first replaced by the nearest falling ones (isotonic regression), then joined by straight lines.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import isotonic_regression

from planner.intervals import Interval

_LOWEST_RATE = 1e-3


class SweepPoint(msgspec.Struct, frozen=True):
    """What was measured at one rate, in requests per second."""

    rate: float
    attainment: Interval


class SweepGoodput(msgspec.Struct, frozen=True):
    """Highest rate that meets the target, with its 95 % interval, in requests per second.

    None stands for an end that the rates which were tried do not reach: `rate` and `low` lie below
    all of them, `high` above. `is_bounded` is false when the highest rate tried still meets the
    target: then `rate` is that one, and the goodput is at least so much. Where even the interval's
    upper end misses the target at the lowest rate, `high` is that rate.
    """

    rate: float | None
    low: float | None
    high: float | None
    is_bounded: bool


def sweep_goodput(points: Sequence[SweepPoint], target: float) -> SweepGoodput:
    """Where the curve of at least one point, and the ends of its intervals, cross the target."""
    points = sorted(points, key=lambda point: point.rate)
    rates = [point.rate for point in points]
    high = _crossing(rates, [point.attainment.high for point in points], target)
    rate = _crossing(rates, [point.attainment.value for point in points], target)
    return SweepGoodput(
        rate=rate,
        low=_crossing(rates, [point.attainment.low for point in points], target),
        high=_high(rates, high),
        is_bounded=rate != rates[-1],
    )


def _high(rates: Sequence[float], crossing: float | None) -> float | None:
    if crossing is None:
        return rates[0]
    return None if crossing == rates[-1] else crossing


def next_rate(
    points: Sequence[SweepPoint], target: float, *, start: float, precision: float = 0.1
) -> float | None:
    """Double or halve until the target lies between two rates, then halve what lies between.

    None when the two are within `precision` of each other.
    """
    if not points:
        return start
    failed = [point.rate for point in points if point.attainment.value < target]
    if not failed:
        return 2 * max(point.rate for point in points)
    high = min(failed)
    passed = [point.rate for point in points if point.rate < high]
    if not passed:
        return high / 2 if high > _LOWEST_RATE else None
    low = max(passed)
    return math.sqrt(low * high) if high > (1 + precision) * low else None


def _crossing(rates: Sequence[float], shares: Sequence[float], target: float) -> float | None:
    """Largest rate of the falling curve at or above the target; None if it is never there."""
    falling = isotonic_regression(np.asarray(shares), increasing=False).x
    above = np.flatnonzero(falling >= target - 1e-12)
    if not len(above):
        return None
    last = int(above[-1])
    if last == len(rates) - 1:
        return rates[-1]
    drop = float(falling[last] - falling[last + 1])
    way = (float(falling[last]) - target) / drop
    return rates[last] + max(0.0, way) * (rates[last + 1] - rates[last])
