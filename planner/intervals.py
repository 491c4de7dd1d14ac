"""Estimates with intervals, from one run whose requests are not independent.

Requests that wait for one another miss together, so a run of N requests says less than N answers
would. Batch means measure by how much: eight batches, the correlation that is left between them
taken out as for a first-order autoregression, Student's t with seven degrees of freedom. Shares
near one are skewed and may show no miss at all; they get Wilson's score interval over the
*effective* number of requests. Rare misses tell little of how they cluster, so that number is
never larger than it would be for looser shares, with four and eight times as many misses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

from planner.workload.requests import Bools, Floats

NUM_BATCHES = 8
MIN_VALUES = 2 * NUM_BATCHES
LOOSER = (4.0, 8.0)
LEAST_RARE = 0.1
MAX_CORRELATION = 0.8  # beyond it a run is too short to know how much it knows


@dataclass(frozen=True)
class Interval:
    """An estimate and the range that covers the long-run value with the chosen confidence."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def divided(self, divisor: float) -> "Interval":
        return Interval(self.value / divisor, self.low / divisor, self.high / divisor)


def wilson(num_hits: int, count: int, confidence: float = 0.95) -> Interval:
    """A share of independent answers (Wilson 1927): short runs whose requests do not interact."""
    quantile = float(special.ndtri((1 + confidence) / 2))
    return _score(num_hits / count, count, quantile)


def share(hits: Bools, signal: Floats, confidence: float = 0.95) -> Interval:
    """The long-run share of hits.

    Args:
        hits: in order of arrival, bool[N].
        signal: the latency (or margin) that decides each hit, float64[N].
    """
    size = effective_size(hits, signal)
    return _score(float(hits.mean()), size, _t_quantile(confidence))


def mean(values: Floats, confidence: float = 0.95) -> Interval:
    """The long-run mean of values in order of arrival, by batch means."""
    value = float(values.mean())
    error = float(values.std()) * _relative_variance(values) ** 0.5
    half_width = _t_quantile(confidence) * error
    return Interval(value, value - half_width, value + half_width)


def percentile(values: Floats, level: float, confidence: float = 0.95) -> Interval:
    """The long-run quantile at `level` (0 to 1): all values at which the share of smaller ones
    could as well have been `level`. No end lies beyond the run's own smallest or largest value."""
    ordered = np.sort(values)
    value = float(ordered[_rank(len(ordered), level)])
    size = effective_size(values <= value, values)
    reach = _t_quantile(confidence) * (level * (1 - level) / size) ** 0.5
    low, high = (float(ordered[_rank(len(ordered), at)]) for at in (level - reach, level + reach))
    return Interval(value, low, high)


def paired_difference(
    first: Floats | Bools, second: Floats | Bools, confidence: float = 0.95
) -> Interval:
    """Mean of first - second over the same requests in two runs.

    What both runs share, they share by request: their arrivals and lengths cancel. Outcomes that
    agree everywhere still leave room for a request that would have told them apart.
    """
    found = mean(first.astype(np.float64) - second.astype(np.float64), confidence)
    if first.dtype != np.bool_:
        return found
    least = 1.0 - wilson(len(first), len(first), confidence).low
    half_width = max(found.half_width, least)
    return Interval(found.value, found.value - half_width, found.value + half_width)


def effective_size(hits: Bools, signal: Floats) -> float:
    """How many independent requests would say as much about the share of hits."""
    shares = [hits, *_looser(hits, signal)]
    relative = max(_relative_variance(each.astype(np.float64)) for each in shares)
    return float(min(max(1.0 / relative, 1.0), len(hits)))


def _looser(hits: Bools, signal: Floats) -> Iterator[Bools]:
    """The hits as they would be if several times as many were misses: a tenth to a half of all.
    (Of the rarer outcome, whichever it is.)"""
    rare = float(hits.mean())
    side = signal
    if rare > 0.5:
        rare, side = 1 - rare, -signal
    for factor in LOOSER:
        wanted = min(max(factor * rare, LEAST_RARE), 0.5)
        # A value that is there: failed requests are infinite, and nothing lies between two.
        yield side < np.quantile(side, wanted, method="inverted_cdf")


def _relative_variance(values: Floats) -> float:
    """Variance of the mean over the variance of a value: 1/N for independent ones."""
    independent = 1.0 / len(values)
    spread = float(values.var())
    if len(values) < MIN_VALUES or spread == 0.0:
        return independent
    size = len(values) // NUM_BATCHES
    batches = values[len(values) - size * NUM_BATCHES :].reshape(NUM_BATCHES, size).mean(axis=1)
    of_mean = float(batches.var(ddof=1)) / NUM_BATCHES * _inflation(batches)
    return max(of_mean / spread, independent)


def _inflation(batches: Floats) -> float:
    """Variance of a mean of correlated batches over that of independent ones, AR(1).

    The sample's correlation is too low by about 1/n on average; it is put back.
    """
    centred = batches - batches.mean()
    power = float(centred @ centred)
    if power == 0.0:
        return 1.0
    correlation = float(centred[1:] @ centred[:-1]) / power + 1 / NUM_BATCHES
    correlation = min(max(correlation, 0.0), MAX_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _score(value: float, size: float, quantile: float) -> Interval:
    weight = quantile**2 / size
    centre = (value + weight / 2) / (1 + weight)
    spread = max(value * (1 - value), 0.0) / size + (quantile / (2 * size)) ** 2
    half_width = quantile / (1 + weight) * spread**0.5
    # Rounding may leave the ends a hair beyond the estimate, or beyond the possible.
    low = max(min(centre - half_width, value), 0.0)
    return Interval(value, low, min(max(centre + half_width, value), 1.0))


def _rank(count: int, level: float) -> int:
    """Index of the smallest value that at least `level` of `count` sorted ones do not exceed."""
    return min(max(int(np.ceil(level * count - 1e-9)) - 1, 0), count - 1)


@cache
def student_t(level: float, degrees: int) -> float:
    """The quantile of Student's t."""
    return float(special.stdtrit(degrees, level))


def _t_quantile(confidence: float) -> float:
    return student_t(confidence + (1 - confidence) / 2, NUM_BATCHES - 1)
