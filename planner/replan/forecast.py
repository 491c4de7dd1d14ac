"""The rate to plan for: an upper quantile of the last hour, carried on along its rise.

The rise is the lower end of a confidence interval for the slope (Theil 1950, Sen 1968): the
median of all slopes between two windows hardly notices a single burst, and a series without a
trend is not extrapolated. A fall is not carried on; too many devices for an hour cost less than
too few. Everything is in logarithms, since loads grow and fall by factors.
"""

import math
from collections.abc import Sequence
from itertools import takewhile

import msgspec
import numpy as np
from scipy import special

from planner.replan.rules import Rules
from planner.replan.window import Window
from planner.workload.requests import Floats

SLOPE_CONFIDENCE = 0.9
LEAST_WINDOWS = 4  # for a slope
MAX_GROWTH = math.log(1.5)  # over the lead: an hour's steepest rise does not last for another


class Forecast(msgspec.Struct, frozen=True):
    """Requests per second over the coming lead: what to expect, and what to plan for.

    `error` is the relative standard error of both: what counts of so many requests leave open.
    """

    level: float
    upper: float
    error: float


def heard(windows: Sequence[Window], rules: Rules) -> Sequence[Window]:
    """Without the windows in which nobody came: a gap in the log, or an outage before it.

    Only a silence that lasts, and is not over, is a rate of zero.
    """
    silent = 0
    while silent < len(windows) and windows[-1 - silent].count == 0:
        silent += 1
    if silent and silent * windows[-1].span_s >= rules.silence_s:
        return windows[-silent:]
    return [window for window in windows if window.count > 0] or windows


def forecast(windows: Sequence[Window], rules: Rules, changed_s: float | None = None) -> Forecast:
    """From the windows of the last `lookback_s`; there is at least one.

    After a shift the level is that of the windows since `changed_s`; the upper rate remembers the
    others as well, so that a fall is believed only an hour later.
    """
    end_s = windows[-1].end_s
    oldest_s = end_s - rules.lookback_s + 1e-6
    recent = list(takewhile(lambda window: window.end_s > oldest_s, reversed(windows)))[::-1]
    logs = np.array([window.log_rate for window in recent])
    ages_s = np.array([end_s - window.end_s for window in recent])
    slope = max(_sure_slope(-ages_s, logs), 0.0)
    carried = logs + slope * ages_s + min(slope * rules.lead_s, MAX_GROWTH)
    since = [changed_s is None or window.start_s >= changed_s for window in recent]
    level, upper = float(carried[since].mean()), float(np.quantile(carried, rules.quantile))
    error = math.sqrt(sum(window.rate_error**2 for window in recent)) / len(recent)
    return Forecast(math.exp(level), math.exp(max(level, upper)), error)


def _sure_slope(times_s: Floats, values: Floats) -> float:
    """The lower end of Sen's interval: the slopes' rank by the variance of Kendall's statistic."""
    count = len(values)
    if count < LEAST_WINDOWS:
        return 0.0
    later, earlier = np.tril_indices(count, -1)
    slopes = (values[later] - values[earlier]) / (times_s[later] - times_s[earlier])
    slopes.sort()
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    reach = float(special.ndtri((1 + SLOPE_CONFIDENCE) / 2)) * deviation
    return float(slopes[max(round((len(slopes) - reach) / 2), 0)])
