"""A look at the log: what calls for another plan, by the log and the placement's goodput alone."""

import math
from collections.abc import Sequence

from planner.replan.forecast import Forecast, forecast, heard
from planner.replan.outcome import Current, Look
from planner.replan.rules import Rules
from planner.replan.shift import changed_s, shifts
from planner.replan.window import Window

NUM_CONFIRMING = 2  # windows that must agree on an excess


def look(
    windows: Sequence[Window], current: Current, rules: Rules, goodput: float | None = None
) -> Look:
    """What the log says. `goodput` is the placement's now, where its lengths are not as planned."""
    now_s = windows[-1].end_s
    told = heard(windows, rules)
    limit = current.goodput.value if goodput is None else goodput
    since_s = max(current.since_s, now_s - rules.memory_s) - 1e-6
    last = told[-NUM_CONFIRMING:]
    confirmed = len(last) == NUM_CONFIRMING
    found = shifts([w for w in told if w.start_s >= since_s], current.planned, rules)
    ahead = forecast(told, rules, changed_s(found))
    forecasts = (ahead, forecast(told[:-1], rules)) if confirmed else ()
    least = _least_carried(current, limit, rules)
    alarm = max(limit, current.accepted_rate * (1 + rules.rate_band))
    return Look(
        at_s=now_s,
        shifts=found,
        forecast=ahead,
        is_threatened=confirmed and all(_exceeds(each, limit, rules) for each in forecasts),
        is_oversized=confirmed and all(each.upper < least for each in forecasts),
        is_emergency=confirmed and all(_surely_above(window, alarm) for window in last),
        wait_s=max(current.since_s + rules.least_interval_s - now_s - 1e-6, 0.0),
    )


def _exceeds(ahead: Forecast, goodput: float, rules: Rules) -> bool:
    return ahead.upper > goodput * math.exp(rules.noise * ahead.error)


def _least_carried(current: Current, goodput: float, rules: Rules) -> float:
    """The rate below which a copy and more than the dead band of the placement are idle."""
    num_copies = current.fleet.num_copies
    return goodput * min((num_copies - 1) / num_copies, 1 / (1 + rules.rate_band))


def _surely_above(window: Window, rate: float) -> bool:
    """By one standard error; with two windows that agree, one time in forty by chance."""
    return window.rate > rate * math.exp(window.rate_error)
