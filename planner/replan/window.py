"""A workload log in windows: how many requests came, how long and how bursty they were.

A window keeps what a shift is told by, and how sure each of its figures is. Long logs need no
more than these summaries; a log of rates alone leaves the lengths out.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from planner.replan.rules import ReplanError
from planner.workload.burstiness import gap_cv
from planner.workload.requests import Ints, Requests

LEAST_GAPS = 8  # fewer say nothing of their variation


class LengthStats(msgspec.Struct, frozen=True):
    """Tokens of one side of the requests: their mean, variation, and how long the longest are."""

    mean: float
    cv: float
    p99: float


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One window of the log.

    Args:
        count: requests that arrived; of a log of rates, the rate times the span.
        inputs, outputs: None where nobody came or the log has no lengths.
        gap_cv: None where too few came, or the log has no arrival times.
    """

    start_s: float
    span_s: float
    count: float
    inputs: LengthStats | None = None
    outputs: LengthStats | None = None
    gap_cv: float | None = None

    @property
    def end_s(self) -> float:
        return self.start_s + self.span_s

    @property
    def rate(self) -> float:
        return self.count / self.span_s

    @property
    def log_rate(self) -> float:
        """Half a request is added: an empty window has a logarithm too."""
        return math.log((self.count + 0.5) / self.span_s)

    @property
    def rate_error(self) -> float:
        """Standard error of `log_rate`. Counts of renewal arrivals vary with the squared CV of
        the gaps (their index of dispersion tends to it); Poisson's where the CV is not known."""
        return max(self.gap_cv or 1.0, 1.0) / math.sqrt(self.count + 0.5)


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """What a placement is planned for: the rate it expects, mean lengths, burstiness."""

    rate: float
    mean_input: float | None = None
    mean_output: float | None = None
    gap_cv: float | None = None


def summarise(
    requests: Requests, window_s: float, *, start_s: float = 0.0, until_s: float | None = None
) -> tuple[Window, ...]:
    """The whole windows from `start_s` on; the last, unfinished one is left out.

    Args:
        until_s: where the log ends, on its own clock; None: at its last request.
    """
    if len(requests) == 0 and until_s is None:
        raise ReplanError("an empty log says nothing: give at least one window of requests")
    end_s = float(requests.arrival_s[-1]) if until_s is None else until_s
    num_windows = int((end_s - start_s) / window_s + 1e-9)
    if num_windows < 1:
        raise ReplanError(
            f"the log spans {end_s - start_s:g} s, less than one window of {window_s:g} s"
        )
    edges = start_s + window_s * np.arange(num_windows + 1)
    cuts = np.searchsorted(requests.arrival_s, edges)
    return tuple(
        _window(_rows(requests, int(first), int(last)), float(edge), window_s)
        for first, last, edge in zip(cuts[:-1], cuts[1:], edges[:-1], strict=True)
    )


def rate_windows(rates: Sequence[float], window_s: float) -> tuple[Window, ...]:
    """Windows of a log that has rates alone, requests per second, one after the other."""
    for rate in rates:
        if not 0 <= rate < math.inf:
            raise ReplanError(f"a rate must be zero or above, not {rate:g} requests/s")
    return tuple(
        Window(start_s=index * window_s, span_s=window_s, count=rate * window_s)
        for index, rate in enumerate(rates)
    )


def rows_between(requests: Requests, since_s: float, until_s: float) -> Requests:
    """The requests that arrived from the one time to before the other, on the log's clock."""
    first, last = np.searchsorted(requests.arrival_s, [since_s, until_s])
    return _rows(requests, int(first), int(last))


def pattern_of(windows: Sequence[Window], rate: float) -> Pattern:
    """The pattern of these windows together, at that rate."""
    return Pattern(
        rate=rate,
        mean_input=_pooled([(w.count, w.inputs.mean) for w in windows if w.inputs]),
        mean_output=_pooled([(w.count, w.outputs.mean) for w in windows if w.outputs]),
        gap_cv=_pooled([(w.count, w.gap_cv) for w in windows if w.gap_cv is not None]),
    )


def _pooled(parts: Sequence[tuple[float, float]]) -> float | None:
    total = sum(count for count, _ in parts)
    return sum(count * value for count, value in parts) / total if total else None


def _window(rows: Requests, start_s: float, span_s: float) -> Window:
    spreads = len(rows) > LEAST_GAPS and rows.arrival_s[-1] > rows.arrival_s[0]
    return Window(
        start_s=start_s,
        span_s=span_s,
        count=float(len(rows)),
        inputs=_lengths(rows.input_tokens),
        outputs=_lengths(rows.output_tokens),
        gap_cv=gap_cv(rows.arrival_s) if spreads else None,
    )


def _lengths(tokens: Ints) -> LengthStats | None:
    if len(tokens) == 0:
        return None
    mean = float(tokens.mean())
    return LengthStats(mean, float(tokens.std()) / mean, float(np.quantile(tokens, 0.99)))


def _rows(requests: Requests, first: int, last: int) -> Requests:
    return requests.part(slice(first, last))
