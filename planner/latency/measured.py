"""Step times from a table that `distserve profile` measured on the device itself.

Between points it interpolates and says MEASURED; beyond them it goes on with a fit of the same
points and says FITTED. Steps in the table are whole steps of the instance; of its stages it knows
what share the slowest one has, and without that takes them as equal.
"""

from collections.abc import Sequence
from pathlib import Path

from ipc.profile_table import DecodePoint, MixedPoint, ProfileTable, TransferPoint
from planner.errors import ProfileError
from planner.latency.fitting import DecodeSample, fit_decode
from planner.latency.grids import Curve, DecodeGrid, Grid, Row, never_falling
from planner.latency.interface import EQUAL, Chunk, Estimate, Slowest, Source, StepLine
from planner.latency.prefill_table import PrefillTable
from planner.latency.profile_file import read_profile


class MeasuredLatency:
    """A latency model over a profile table."""

    source = Source.MEASURED

    def __init__(self, table: ProfileTable) -> None:
        self.table = table
        self.num_stages = table.pp
        self.slowest = _slowest(table)
        self.num_devices = table.tp * table.pp
        self._unit_s = 1e-3 / table.pp
        self._prefill = PrefillTable(table.prefill, table.mixed, table.pp)
        self._decode, self.decode_spread = self._decode_grid(table.decode)
        self._mixed = self._mixed_grid([p for p in table.mixed if p.batch])
        self._transfer = self._transfer_curve(table.transfer)

    @classmethod
    def read(cls, path: Path) -> "MeasuredLatency":
        """From the file that `distserve profile` wrote; ProfileError if it cannot be used."""
        return cls(read_profile(path))

    @property
    def prefill_spread(self) -> float:
        """Relative standard deviation of the measured prefills around their fit."""
        return self._prefill.spread

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        return self._prefill(chunks)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        return self._decode.line(batch, context_tokens)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        """Parts do not add up in a mixed step, so measured ratios to their sum are interpolated."""
        if not chunks:
            line = self.decode(batch, context_tokens)
            return Estimate(line.seconds(context_tokens), line.source)
        if batch == 0:
            return self.prefill(chunks)
        seconds = self._sum_s(chunks, batch, context_tokens)
        if self._mixed is None:
            return Estimate(seconds, Source.FITTED)
        point = (*_as_one(chunks), batch, context_tokens / batch)
        source = Source.MEASURED if self._mixed.covers(*point) else Source.FITTED
        return Estimate(seconds * self._mixed(*point), source)

    def transfer(self, num_tokens: int) -> Estimate:
        if self._transfer is None:
            raise ProfileError(
                f"the profile of {self.table.model} has no pulls: measure it with a second pool"
            )
        inside = self._transfer.covers(num_tokens)
        source = Source.MEASURED if inside else Source.FITTED
        return Estimate(max(0.0, self._transfer(num_tokens)), source)

    def _sum_s(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> float:
        prefill_s = self.prefill(chunks).seconds
        return prefill_s + self.decode(batch, context_tokens).seconds(context_tokens)

    def _decode_grid(self, points: Sequence[DecodePoint]) -> tuple[DecodeGrid, float]:
        samples = [DecodeSample(p.batch, p.batch * p.context, p.ms * self._unit_s) for p in points]
        regimes, spread = fit_decode(samples)
        rows: dict[int, Row] = {}
        for batch in sorted({p.batch for p in points}):
            row = sorted(
                (float(p.context), p.ms * self._unit_s) for p in points if p.batch == batch
            )
            rows[batch] = row
        return DecodeGrid(rows, regimes.small), spread

    def _mixed_grid(self, points: Sequence[MixedPoint]) -> Grid | None:
        """Measured mixed steps over the sum of their parts."""
        if not points:
            return None
        ratios: dict[tuple[float, ...], float] = {}
        for p in points:
            sum_s = self._sum_s([Chunk(p.num_new, p.num_cached)], p.batch, p.batch * p.context)
            key = (float(p.num_new), float(p.num_cached), float(p.batch), float(p.context))
            ratios[key] = p.ms * self._unit_s / sum_s
        return Grid(ratios)

    def _transfer_curve(self, points: Sequence[TransferPoint]) -> Curve | None:
        if len(points) < 2:
            return None
        row = never_falling(sorted((float(p.num_tokens), p.ms * 1e-3) for p in points))
        (x0, y0), (x1, y1) = row[0], row[-1]
        return Curve(row, slope_below=0.0, slope_above=(y1 - y0) / (x1 - x0))


def _slowest(table: ProfileTable) -> Slowest:
    """A share below an equal one is the measurement's noise."""
    shares = table.slowest_stage
    if shares is None:
        return EQUAL
    return Slowest(max(1.0, table.pp * shares.prefill), max(1.0, table.pp * shares.decode))


def _as_one(chunks: Sequence[Chunk]) -> tuple[float, float]:
    """Several chunks as one: all their tokens, after the mean of what was cached for each."""
    tokens = sum(chunk.num_new for chunk in chunks)
    cached = sum(chunk.num_new * chunk.num_cached for chunk in chunks)
    return float(tokens), cached / tokens
