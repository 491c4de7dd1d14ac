"""Prefill times between measured ones: prompts alone, packed together, and with cached tokens.

A measured step is taken apart into what grows with the square of its prompts, what each further
prompt costs, and the rest, which is a curve in tokens: so packed steps and lone ones lie on the
same curve, and every measured step alone at its number of tokens is given back exactly.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from ipc.latency import PrefillTerms, square_tokens
from ipc.profile_table import MixedPoint, PrefillPoint
from planner.latency.fitting import PrefillSample, fit_packed
from planner.latency.grids import Curve, Grid, never_falling
from planner.latency.interface import Chunk, Estimate, Source


class PrefillTable:
    """`curve(tokens) + per_square * t2 + per_prompt * (prompts - 1)`, cached tokens on top."""

    def __init__(
        self, points: Sequence[PrefillPoint], chunks: Sequence[MixedPoint], num_stages: int = 1
    ) -> None:
        self._unit_s = 1e-3 / num_stages
        samples = [self._sample(point) for point in points]
        packed = fit_packed(samples, [point.num_prompts for point in points])
        self._per_square_s, self._per_prompt_s = packed.per_square_s, packed.per_prompt_s
        self._curve = self._rest(points, samples, packed.per_token_s)
        self._cached = self._cached_grid([p for p in chunks if p.batch == 0 and p.num_cached])
        self.terms = PrefillTerms(packed.base_s, packed.per_token_s, packed.per_square_s)
        self.spread = packed.spread

    def __call__(self, chunks: Sequence[Chunk]) -> Estimate:
        tokens, squares, cached_s = 0, 0, 0.0
        for num_new, num_cached in chunks:
            tokens += num_new
            squares += num_new * num_new
            if num_cached:
                cached_s += self.cached_s(num_new, num_cached)
        prompts_s = self._per_prompt_s * (len(chunks) - 1)
        seconds = self._curve(tokens) + self._per_square_s * squares + prompts_s + cached_s
        inside = self._curve.first <= tokens <= self._curve.last and (
            cached_s == 0.0 or self._covers_cached(chunks)
        )
        return Estimate(seconds, Source.MEASURED if inside else Source.FITTED)

    def cached_s(self, num_new: int, num_cached: int) -> float:
        """What the cached tokens of one chunk cost: Appendix A's square where none was measured."""
        if self._cached is None:
            return self._per_square_s * (square_tokens(num_new, num_cached) - num_new**2)
        new_axis, cached_axis = self._cached.axes
        new, cached = min(num_new, new_axis[-1]), min(num_cached, cached_axis[-1])
        beyond = num_new * num_cached / (new * cached)
        return self._cached(new, cached) * beyond

    def _covers_cached(self, chunks: Sequence[Chunk]) -> bool:
        return self._cached is not None and all(
            self._cached.covers(c.num_new, c.num_cached) for c in chunks if c.num_cached
        )

    def _sample(self, point: PrefillPoint) -> PrefillSample:
        tokens = point.num_prompts * point.num_tokens
        return PrefillSample(tokens, tokens * point.num_tokens, point.ms * self._unit_s)

    def _rest(
        self, points: Sequence[PrefillPoint], samples: Sequence[PrefillSample], slope: float
    ) -> Curve:
        """The curve in tokens; below its first point it heads for the fit's constant."""
        rest: dict[int, list[float]] = defaultdict(list)
        for point, sample in zip(points, samples, strict=True):
            prompts_s = self._per_prompt_s * (point.num_prompts - 1)
            squares_s = self._per_square_s * sample.squares
            rest[sample.tokens].append(sample.seconds - squares_s - prompts_s)
        row = never_falling([(tokens, fmean(rest[tokens])) for tokens in sorted(rest)])
        (x0, y0), (x1, y1) = row[:2]
        slope_below = min((y1 - y0) / (x1 - x0), max(0.0, y0) / x0)
        return Curve(row, slope_below=slope_below, slope_above=slope)

    def _cached_grid(self, chunks: Sequence[MixedPoint]) -> Grid | None:
        """What cached tokens added to measured chunks: never less for more of either."""
        if not chunks:
            return None
        added: dict[tuple[float, ...], float] = {}
        for point in sorted(chunks, key=lambda p: (p.num_new, p.num_cached)):
            new, cached = float(point.num_new), float(point.num_cached)
            alone_s = self._curve(new) + self._per_square_s * new * new
            before = [s for (n, c), s in added.items() if n <= new and c <= cached]
            added[new, cached] = max(0.0, point.ms * self._unit_s - alone_s, *before)
        edges: dict[tuple[float, ...], float] = {(0.0, c): 0.0 for _, c in added}
        edges |= {(n, 0.0): 0.0 for n, _ in added}
        return Grid(edges | {(0.0, 0.0): 0.0} | added)
