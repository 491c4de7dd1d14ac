"""Runs of a deployment over several seeds, summed up: the mean, and where one more run would lie.

The paper's points are single runs of a few hundred requests, so each is compared with the spread
of runs as long as it, not with a long-run value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.paper_curves import crossing, one_more_run
from planner.report.contents import Line, Origin
from planner.report.terms import Terms
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.workload.workload import Workload

GROWTH = 1.15  # from rate to rate and from scale to scale, beyond the measured ones
MAX_EXTRA = 24


@dataclass(frozen=True)
class Setting:
    """A deployment under a load, ready to run.

    Args:
        known: what its step times are, in words.
        origin: of what is simulated with it.
    """

    label: str
    service: Service
    workload: Workload
    num_requests: int
    known: str
    origin: Origin = Origin.SIMULATED

    def run(self, per_device_rate: float, seed: int) -> Timeline:
        rate = per_device_rate * self.service.num_devices
        return simulate(self.service, self.workload.requests(self.num_requests, rate, seed))


@dataclass(frozen=True)
class Spread:
    """Over seeds: the mean, and the ends between which one more run would lie."""

    mean: float
    low: float
    high: float

    @property
    def told(self) -> str:
        """Of percents: the reach is to the farther end."""
        reach = max(self.mean - self.low, self.high - self.mean)
        return f"{self.mean:.1f} ±{reach:.0f}"


@dataclass(frozen=True)
class Crossing:
    """Where runs fall below the target: that of the mean, and of the middle 90 % of the seeds."""

    value: float
    low: float
    high: float

    @property
    def told(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g}-{self.high:.3g})" if self.value else "none"


@dataclass(frozen=True)
class Swept:
    """Percents over rates or SLO scales: float[points][seeds]."""

    at: tuple[float, ...]
    percents: tuple[tuple[float, ...], ...]

    @property
    def spreads(self) -> list[Spread]:
        return [Spread(*one_more_run(values)) for values in self.percents]

    @property
    def means(self) -> list[float]:
        return [float(np.mean(values)) for values in self.percents]

    @property
    def best_at_the_end(self) -> float:
        """What one run in twenty exceeds at the last point."""
        return float(np.percentile(self.percents[-1], 95))

    def line(self, label: str, origin: Origin) -> Line:
        spreads = self.spreads
        return Line(
            label=label,
            origin=origin,
            at=self.at,
            values=tuple(each.mean for each in spreads),
            low=tuple(each.low for each in spreads),
            high=tuple(each.high for each in spreads),
        )

    def crossing(self, percent: float) -> Crossing:
        """The goodput, where this is over rising rates."""
        return self._crossed(lambda values: crossing(self.at, values, percent))

    def smallest(self, percent: float) -> Crossing:
        """The smallest scale that reaches the target, where this is over SLO scales."""
        return self._crossed(lambda values: smallest_scale(self.at, values, percent))

    def _crossed(self, find: Callable[[Sequence[float]], float]) -> Crossing:
        found = [find(values) for values in zip(*self.percents, strict=True)]
        low, high = np.percentile(found, (5, 95))
        return Crossing(find(self.means), float(low), float(high))


def over_rates(setting: Setting, slo: Slo, rates: Sequence[float], terms: Terms) -> Swept:
    """Attainment at each rate per device."""
    return Swept(tuple(rates), tuple(_attained(setting, slo, rate, terms) for rate in rates))


def until_missed(setting: Setting, slo: Slo, rates: Sequence[float], terms: Terms) -> Swept:
    """The same, and on to higher rates until nearly all runs have fallen below the target."""
    swept = over_rates(setting, slo, rates, terms)
    while swept.best_at_the_end >= terms.percent and len(swept.at) < len(rates) + MAX_EXTRA:
        rate = swept.at[-1] * GROWTH
        more = _attained(setting, slo, rate, terms)
        swept = Swept((*swept.at, rate), (*swept.percents, more))
    return swept


def over_scales(
    setting: Setting, slo: Slo, rate: float, scales: Sequence[float], terms: Terms
) -> Swept:
    """Attainment at one rate with both targets multiplied by each falling scale (paper section
    6.2), and on to stricter ones until nearly all runs have fallen below the target.

    Latencies know nothing of the targets, so that one run serves all scales.
    """
    terms.watch(f"{setting.label}, SLO scales at {rate:g}")
    runs = [setting.run(rate, seed) for seed in terms.seeds]

    def attained(scale: float) -> tuple[float, ...]:
        return tuple(_percent(run, slo.scaled(scale)) for run in runs)

    swept = Swept(tuple(scales), tuple(attained(scale) for scale in scales))
    while swept.best_at_the_end >= terms.percent and len(swept.at) < len(scales) + MAX_EXTRA:
        scale = swept.at[-1] / GROWTH
        swept = Swept((*swept.at, scale), (*swept.percents, attained(scale)))
    return swept


def smallest_scale(scales: Sequence[float], percents: Sequence[float], percent: float) -> float:
    """Where the line falls below the target on the way to stricter scales; 0 where it is below
    from the start."""
    order = np.argsort(scales)[::-1]
    loosest = float(scales[int(order[0])])
    strictness = [loosest - float(scales[int(k)]) for k in order]
    values = [float(percents[int(k)]) for k in order]
    if values[0] < percent:
        return 0.0
    return loosest - crossing(strictness, values, percent)


def _attained(setting: Setting, slo: Slo, rate: float, terms: Terms) -> tuple[float, ...]:
    terms.watch(f"{setting.label} at {rate:.3g}")
    return tuple(_percent(setting.run(rate, seed), slo) for seed in terms.seeds)


def _percent(run: Timeline, slo: Slo) -> float:
    return 100 * float(run.meets(slo).mean())
