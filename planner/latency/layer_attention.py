"""Attention between measured calls: chunks alone, decodes alone, and both in one call.

A chunk's time is straight in what is cached; in its own length it is level up to a tile or two and
then a parabola. A decode beside a chunk takes up to four times as long as alone, since the mixed
kernel does not split its keys among processors: that factor is what is interpolated.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from planner.latency.fitting import DecodeSample, fit_decode
from planner.latency.grids import Curve, DecodeGrid, Grid, Row
from planner.latency.interface import Chunk
from planner.latency.layer_file import AttentionPoint

TILED_TOKENS = 256
"""Chunks up to here take as long as their tiles, whatever their length."""


class ChunkAttention:
    """Seconds of one chunk by (new tokens, cached tokens), and of several in one call."""

    def __init__(self, points: Mapping[AttentionPoint, float]) -> None:
        rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for point, seconds in points.items():
            rows[point.num_new].append((float(point.num_cached), seconds))
        self._lengths = sorted(rows)
        self._rows = [_straight_on(sorted(rows[length])) for length in self._lengths]
        self._floor_s = min(points.values())

    def __call__(self, chunks: Sequence[Chunk]) -> float:
        """One call computes all chunks: its start is paid once."""
        seconds = self._floor_s
        for num_new, num_cached in chunks:
            seconds += self.alone_s(num_new, num_cached) - self._floor_s
        return seconds

    def alone_s(self, num_new: int, num_cached: int) -> float:
        lengths, rows = self._lengths, self._rows
        i = bisect_right(lengths, num_new)
        if i == 0:
            return rows[0](num_cached)
        if i == len(lengths):
            last = lengths[-1]
            work = num_new * (num_cached + num_new / 2) / (last * (num_cached + last / 2))
            return rows[-1](num_cached) * work
        low, high = lengths[i - 1], lengths[i]
        low_s, high_s = rows[i - 1](num_cached), rows[i](num_cached)
        share = (num_new - low) / (high - low)
        if low < TILED_TOKENS:
            return low_s + (high_s - low_s) * share
        # Time per token is straight where time is a parabola through the origin.
        return num_new * (low_s / low + (high_s / high - low_s / low) * share)


class MixedFactor:
    """By how much decodes take longer in one call with a chunk."""

    def __init__(
        self, points: Mapping[AttentionPoint, float], chunks: ChunkAttention, decodes: DecodeGrid
    ) -> None:
        factors: dict[tuple[float, ...], float] = {}
        for p, seconds in points.items():
            alone_s = decodes.line(p.batch, p.batch * p.context).seconds(p.batch * p.context)
            beside_s = seconds - chunks.alone_s(p.num_new, p.num_cached)
            factors[tuple(float(x) for x in p)] = beside_s / alone_s
        self._grid = Grid(factors) if factors else None

    def __call__(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> float:
        if self._grid is None:
            return 1.0
        tokens = sum(chunk.num_new for chunk in chunks)
        cached = sum(chunk.num_new * chunk.num_cached for chunk in chunks) / tokens
        return self._grid(tokens, cached, batch, context_tokens / batch)

    def covers(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> bool:
        tokens = sum(chunk.num_new for chunk in chunks)
        cached = sum(chunk.num_new * chunk.num_cached for chunk in chunks) / tokens
        grid = self._grid
        return grid is not None and grid.covers(tokens, cached, batch, context_tokens / batch)


def decode_attention(points: Mapping[AttentionPoint, float], num_layers: int) -> DecodeGrid:
    """Of all layers together."""
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    samples = []
    for p, seconds in points.items():
        rows[p.batch].append((float(p.context), seconds * num_layers))
        samples.append(DecodeSample(p.batch, p.batch * p.context, seconds * num_layers))
    regimes, _ = fit_decode(samples)
    ordered: dict[int, Row] = {batch: sorted(row) for batch, row in rows.items()}
    return DecodeGrid(ordered, regimes.small)


def _straight_on(row: list[tuple[float, float]]) -> Curve:
    """A curve that goes on as it ended."""
    if len(row) < 2:
        return Curve(row, slope_below=0.0, slope_above=0.0)
    (x0, y0), (x1, y1) = row[-2:]
    return Curve(row, slope_below=0.0, slope_above=max(0.0, (y1 - y0) / (x1 - x0)))
