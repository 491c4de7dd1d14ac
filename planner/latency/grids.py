"""Interpolation between measured points: a curve, a grid of any dimension, and decode steps.

Plain floats and bisection, for these are asked once per simulated step. What lies beyond the
measured range continues with a fit's slopes, anchored at the last point, so that nothing jumps.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import inf

from scipy.optimize import isotonic_regression

from ipc.latency import DecodeTerms
from planner.latency.interface import Source, StepLine

Row = Sequence[tuple[float, float]]
"""Points of one curve, x rising."""


class Curve:
    """Straight between points; beyond them along the given slopes."""

    def __init__(self, points: Row, *, slope_below: float, slope_above: float) -> None:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        self.first, self.last = xs[0], xs[-1]
        self._xs = xs
        self._slopes = [slope_below, *slopes, slope_above]
        anchors = [(xs[0], ys[0]), *zip(xs, ys, strict=True)]
        self._bases = [y - k * x for (x, y), k in zip(anchors, self._slopes, strict=True)]

    def __call__(self, x: float) -> float:
        i = bisect_right(self._xs, x)
        return self._bases[i] + self._slopes[i] * x

    def covers(self, x: float) -> bool:
        return self.first <= x <= self.last


def never_falling(points: Row) -> list[tuple[float, float]]:
    """The nearest values that never fall, by least squares: noise must not reward work. What falls
    is replaced by its mean (isotonic regression): raising it to the largest value before it would
    make every level stretch as slow as its slowest measurement."""
    levelled = isotonic_regression([y for _, y in points]).x.tolist()
    return list(zip((x for x, _ in points), levelled, strict=True))


def never_falling_rows(rows: Mapping[int, Row]) -> dict[int, Row]:
    """The same of a grid, by row and by x: first along the rows' numbers, where they have the same
    x, then along each row, which keeps what the first has done."""
    columns: dict[float, list[tuple[float, float]]] = {}
    for number in sorted(rows):
        for x, y in rows[number]:
            columns.setdefault(x, []).append((float(number), y))
    levelled = {x: dict(never_falling(column)) for x, column in columns.items()}
    return {
        number: never_falling([(x, levelled[x][float(number)]) for x, _ in row])
        for number, row in rows.items()
    }


class Grid:
    """Multilinear between the knots of a rectangular grid, level outside.

    Corners that were not measured (there was no room for them) take the value of the nearest one
    that was, counted in knots.
    """

    def __init__(self, values: Mapping[tuple[float, ...], float]) -> None:
        points = list(values)
        self.axes = [sorted({point[axis] for point in points}) for axis in range(len(points[0]))]
        known = {self._index(point): value for point, value in values.items()}
        every = product(*(range(len(axis)) for axis in self.axes))
        self._values = {i: known.get(i, known[_nearest(i, known)]) for i in every}

    def __call__(self, *point: float) -> float:
        corners = [_between(axis, x) for axis, x in zip(self.axes, point, strict=True)]
        total = 0.0
        for corner in product(*corners):
            weight = 1.0
            for _, share in corner:
                weight *= share
            total += weight * self._values[tuple(i for i, _ in corner)]
        return total

    def covers(self, *point: float) -> bool:
        return all(a[0] <= x <= a[-1] for a, x in zip(self.axes, point, strict=True))

    def _index(self, point: tuple[float, ...]) -> tuple[int, ...]:
        return tuple(axis.index(x) for axis, x in zip(self.axes, point, strict=True))


def _nearest(index: tuple[int, ...], known: Mapping[tuple[int, ...], float]) -> tuple[int, ...]:
    return min(known, key=lambda k: sum(abs(a - b) for a, b in zip(k, index, strict=True)))


def _between(axis: Sequence[float], x: float) -> list[tuple[int, float]]:
    """The knots around x and their shares; one knot alone at and beyond the ends."""
    if x <= axis[0]:
        return [(0, 1.0)]
    if x >= axis[-1]:
        return [(len(axis) - 1, 1.0)]
    i = bisect_right(axis, x)
    share = (x - axis[i - 1]) / (axis[i] - axis[i - 1])
    return [(i - 1, 1 - share), (i, share)]


class DecodeGrid:
    """Decode steps measured by (batch, context of each sequence), asked by (batch, summed context).

    Bilinear in batch and context of each, which is exact for Appendix A's form. For one batch that
    is a chain of straight lines in the summed context, made once and kept.
    """

    def __init__(self, rows: Mapping[int, Row], beyond: DecodeTerms) -> None:
        self._beyond = beyond
        rows = never_falling_rows(rows)
        self._rows = {batch: self._curve(batch, rows[batch]) for batch in sorted(rows)}
        self._knots = {batch: [x for x, _ in rows[batch]] for batch in rows}
        self._batches = sorted(rows)
        self._chains: dict[int, tuple[list[float], list[StepLine]]] = {}

    def line(self, batch: int, context_tokens: float) -> StepLine:
        chain = self._chains.get(batch)
        if chain is None:
            chain = self._chains[batch] = self._chain(batch)
        ends, lines = chain
        return lines[bisect_right(ends, context_tokens)]

    def _curve(self, batch: int, row: Row) -> Curve:
        slope = self._beyond.per_token_s * batch
        return Curve(row, slope_below=slope, slope_above=slope)

    def _chain(self, batch: int) -> tuple[list[float], list[StepLine]]:
        """Lines between knots; the first and the last continue the grid with the fit's slope."""
        low, high = self._neighbours(batch)
        inside = self._batches[0] <= batch <= self._batches[-1]
        knots = sorted({*self._knots[low], *self._knots[high]})
        covered = min(self._rows[low].last, self._rows[high].last)
        measured_from = max(self._rows[low].first, self._rows[high].first)
        seconds = [self._seconds(batch, x) for x in knots]
        seconds = list(accumulate(seconds, max))
        slope = self._beyond.per_token_s
        lines = [_through(batch, knots[0], seconds[0], slope, knots[0] * batch)]
        for (x0, y0), (x1, y1) in pairwise(zip(knots, seconds, strict=True)):
            is_measured = inside and x0 >= measured_from and x1 <= covered
            source = Source.MEASURED if is_measured else Source.FITTED
            slope_s = (y1 - y0) / ((x1 - x0) * batch)
            lines.append(_through(batch, x0, y0, slope_s, x1 * batch)._replace(source=source))
        lines.append(_through(batch, knots[-1], seconds[-1], slope, inf))
        return [x * batch for x in knots], lines

    def _seconds(self, batch: int, context: float) -> float:
        """One step at a context of each sequence."""
        low, high = self._neighbours(batch)
        below_s = self._rows[low](context)
        if low != high:
            above_s = max(below_s, self._rows[high](context))
            return below_s + (above_s - below_s) * (batch - low) / (high - low)
        per_sequence_s = self._beyond.per_sequence_s + self._beyond.per_token_s * context
        return max(0.0, below_s + (batch - low) * per_sequence_s)

    def _neighbours(self, batch: int) -> tuple[int, int]:
        (i, _), *more = _between(self._batches, batch)
        return self._batches[i], self._batches[more[0][0] if more else i]


def _through(
    batch: int, context: float, seconds: float, per_token_s: float, until_tokens: float
) -> StepLine:
    """The line through one measured step."""
    base_s = seconds - per_token_s * context * batch
    return StepLine(base_s, per_token_s, until_tokens, Source.FITTED)
