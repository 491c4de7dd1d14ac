"""Arrivals fitted from a trace: a rate that varies with time, times renewal gaps.

The span is cut into windows of about 10 to 60 s. Their rates make a cumulative rate Lambda(t)
that is linear within each; mapped by it, the trace's gaps have mean one, and a Gamma or a Weibull
distribution is fitted to them. Counts of a window scatter even at a constant rate; the windows'
rates are drawn towards the mean by just so much that the fitted process scatters as the trace
does, rather than once for the observed counts and once more for its own draws.
"""

import msgspec
import numpy as np

from planner.errors import WorkloadError
from planner.workload.burstiness import IDC_BINS_S, dispersion, gap_cv
from planner.workload.gap_families import GapFit, fit_gaps
from planner.workload.requests import Floats

MIN_REQUESTS = 50
MAX_SPAN_S = 1e7  # four months: windows and bins of seconds have to fit in memory
WINDOW_S = (10.0, 60.0)
# Windows are as short as they can be while they hold this many requests in the mean.
REQUESTS_PER_WINDOW = 50
# The gaps' spread decides how far rates shrink, and the rates decide the gaps: a few rounds settle.
NUM_ROUNDS = 4
# More equal times than this share mean that the clock had steps, not that requests came at once.
MAX_EQUAL_TIMES = 0.2


class ArrivalFit(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted process, and what the trace's burstiness was.

    Args:
        rate: mean arrivals per second.
        window_s: width of every window.
        window_rates: arrivals per second in each, already drawn towards the mean.
        gaps: the families tried, the one that is used first.
        gap_cv: of the trace.
        idc: index of dispersion of the trace's counts by the bins' width in whole seconds.
        clock_step_s: the trace's times come in steps this wide, over which requests were spread
            evenly at random before the fit; None for a fine clock.
    """

    rate: float
    window_s: float
    window_rates: tuple[float, ...]
    gaps: tuple[GapFit, GapFit]
    gap_cv: float
    idc: dict[str, float | None]
    clock_step_s: float | None = None

    @property
    def span_s(self) -> float:
        return self.window_s * len(self.window_rates)

    def cumulative(self) -> tuple[Floats, Floats]:
        """Edges of the windows in seconds, and Lambda at each of them."""
        return _cumulative(self.window_s, np.array(self.window_rates))


def fit_arrivals(arrival_s: Floats) -> ArrivalFit:
    """Fit a trace's times."""
    if len(arrival_s) < MIN_REQUESTS or arrival_s[-1] <= arrival_s[0]:
        raise WorkloadError(
            f"arrivals are fitted to at least {MIN_REQUESTS} requests at different times; "
            f"this trace has {len(arrival_s)} over {arrival_s[-1] - arrival_s[0]:g} s"
        )
    if arrival_s[-1] - arrival_s[0] > MAX_SPAN_S:
        raise WorkloadError(
            f"arrivals are fitted to traces of at most {MAX_SPAN_S:g} s; "
            f"this one spans {arrival_s[-1] - arrival_s[0]:g} s"
        )
    times_s, clock_step_s = _off_the_clock(arrival_s - arrival_s[0])
    rate = (len(times_s) - 1) / float(times_s[-1])
    window_s, counts = _windows(times_s, rate)
    rates, gaps = _settle(times_s, window_s, counts)
    return ArrivalFit(
        rate=rate,
        window_s=window_s,
        window_rates=tuple(rates.tolist()),
        gaps=gaps,
        gap_cv=gap_cv(arrival_s),
        idc={f"{bin_s:g}": dispersion(arrival_s, bin_s) for bin_s in IDC_BINS_S},
        clock_step_s=clock_step_s,
    )


def _off_the_clock(times_s: Floats) -> tuple[Floats, float | None]:
    """Times spread over the clock's steps, where it had coarse ones; and the step."""
    gaps_s = np.diff(times_s)
    if float(np.mean(gaps_s == 0)) <= MAX_EQUAL_TIMES:
        return times_s, None
    step_s = float(gaps_s[gaps_s > 0].min())
    # Any seed will do, but always the same: a fit is a fact about its trace.
    within_s = np.random.default_rng(0).random(len(times_s)) * step_s
    spread_s = np.sort(times_s + within_s)
    return spread_s - spread_s[0], step_s


def _windows(times_s: Floats, rate: float) -> tuple[float, Floats]:
    """Width of the windows, which cover the span exactly, and the gaps that end in each."""
    wanted_s = float(np.clip(REQUESTS_PER_WINDOW / rate, *WINDOW_S))
    num_windows = max(1, round(float(times_s[-1]) / wanted_s))
    counts, _ = np.histogram(times_s[1:], num_windows, range=(0.0, float(times_s[-1])))
    return float(times_s[-1]) / num_windows, counts.astype(np.float64)


def _settle(
    times_s: Floats, window_s: float, counts: Floats
) -> tuple[Floats, tuple[GapFit, GapFit]]:
    squared_cv = 1.0
    for _ in range(NUM_ROUNDS):
        rates = _drawn_in(counts, squared_cv) / window_s
        edges_s, cumulative = _cumulative(window_s, rates)
        gaps = np.diff(np.interp(times_s, edges_s, cumulative))
        positive = gaps[gaps > 0]
        fits = fit_gaps(positive / positive.mean())
        squared_cv = fits[0].family.squared_cv(fits[0].shape)
    return rates, fits


def _drawn_in(counts: Floats, squared_cv: float) -> Floats:
    """Counts whose variance, with that of renewal counts on top, is the observed one.

    A renewal process of unit rate has var/mean = CV^2 over long bins; a share of that much of the
    observed IDC is chance, and the deviations from the mean shrink by its root.
    """
    mean = counts.mean()
    observed = counts.var() / mean
    kept = np.sqrt(max(0.0, 1 - squared_cv / observed)) if observed > 0 else 0.0
    return np.asarray(mean + kept * (counts - mean), np.float64)


def _cumulative(window_s: float, rates: Floats) -> tuple[Floats, Floats]:
    edges_s = window_s * np.arange(len(rates) + 1, dtype=np.float64)
    return edges_s, np.concatenate([np.zeros(1), np.cumsum(rates * window_s)])
