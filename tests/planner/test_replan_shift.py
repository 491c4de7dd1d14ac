"""What counts as a shift: no noise, no single burst, nothing in the dead band, but every step."""

from collections.abc import Sequence

import numpy as np
import pytest

from planner.replan.look import look
from planner.replan.outcome import Look
from planner.replan.rules import ReplanError, Rules, SwitchRates
from planner.replan.shift import Figure, shifts
from planner.replan.window import Pattern, Window, pattern_of, rate_windows, summarise
from planner.workload.arrivals import Renewal
from planner.workload.requests import Requests
from tests.planner.replan_series import serving

RULES = Rules()
DAY_S = 24 * 3600.0


def log_of(rate: float, seconds: float, *, cv: float = 1.0, seed: int = 0) -> Requests:
    """Gamma gaps, and log-normal lengths as a chat has them."""
    count = int(rate * seconds)
    random = np.random.default_rng(seed)
    return Requests(
        Renewal.with_cv(cv).times(count, seed) / rate,
        np.maximum(random.lognormal(6.0, 0.8, count), 1).astype(np.int64),
        np.maximum(random.lognormal(4.5, 1.0, count), 1).astype(np.int64),
    )


def looks(
    windows: Sequence[Window], planned: Pattern, *, goodput: float, first: int = 2
) -> list[Look]:
    """One after each window, at six hours of log, of a placement that nobody replans."""
    current = serving(1, goodput, planned)
    ends = range(first, len(windows) + 1)
    return [look(windows[max(end - 36, 0) : end], current, RULES) for end in ends]


def after(base: float, *factors: float) -> tuple[Window, ...]:
    """A day at `base` requests/s, then windows at so many times that."""
    return rate_windows([base] * 144 + [base * factor for factor in factors], 600.0)


def fires(windows: Sequence[Window], *, goodput: float = 1e9) -> bool:
    current = serving(1, goodput, Pattern(rate=windows[0].rate))
    return look(windows, current, RULES).fires


@pytest.mark.parametrize(("cv", "most"), [(1.0, 0), (2.0, 1)])
def test_fourteen_days_of_noise_fire_nothing_and_of_bursts_next_to_nothing(
    cv: float, most: int
) -> None:
    windows = summarise(log_of(0.5, 14 * DAY_S, cv=cv), RULES.window_s)
    planned = pattern_of(windows[:6], 0.5)
    seen = looks(windows, planned, goodput=0.65)
    assert len(seen) > 2_000
    assert sum(each.calls for each in seen) <= most


def test_a_step_of_half_the_rate_up_fires_with_its_second_window() -> None:
    assert not fires(after(10.0, 1.5))
    assert fires(after(10.0, 1.5, 1.5))
    found = shifts(after(10.0, 1.5, 1.5), Pattern(rate=10.0), RULES)
    assert [shift.figure for shift in found] == [Figure.RATE]
    assert found[0].factor == pytest.approx(1.5, rel=1e-3)
    assert found[0].since_s == 144 * 600.0


def test_a_step_down_fires_as_fast() -> None:
    assert not fires(after(10.0, 0.6))
    assert fires(after(10.0, 0.6, 0.6))


@pytest.mark.parametrize("height", [3.0, 100.0])
def test_one_burst_of_a_window_is_forgotten_however_high(height: float) -> None:
    assert not any(fires(after(10.0, height, *calm)) for calm in ([], [1.0], [1.0] * 6))


def test_bursts_that_come_back_every_hour_do_not_add_up() -> None:
    assert not fires(after(10.0, *[3.0, 1.0, 1.0, 1.0, 1.0, 1.0] * 20, 3.0))


def test_flapping_within_the_dead_band_never_fires() -> None:
    windows = after(10.0, *[1.18, 0.85] * 500)
    assert not any(seen.calls for seen in looks(windows, Pattern(rate=10.0), goodput=1e9))


def test_a_change_just_beyond_the_band_is_told_later_than_a_large_one() -> None:
    small, large = (
        next(n for n in range(1, 50) if fires(after(10.0, *[factor] * n))) for factor in (1.25, 2.0)
    )
    assert large == 2
    assert 3 <= small <= 15


def test_a_slow_drift_fires_before_the_goodput_is_exceeded() -> None:
    hours = np.arange(0, 48 * 6) / 6
    windows = rate_windows([float(10 * 1.03**hour) for hour in hours], 600.0)
    goodput = 11.5  # 15 % above the plan: inside the dead band
    first = next(n for n in range(2, len(windows)) if fires(windows[:n], goodput=goodput))
    assert windows[first].rate < goodput
    assert look(windows[:first], serving(1, goodput, Pattern(rate=10.0)), RULES).is_threatened


def test_outputs_twice_as_long_fire_at_an_unchanged_rate() -> None:
    before, later = log_of(2.0, 7200.0), log_of(2.0, 1200.0, seed=1)
    windows = [*summarise(before, 600.0, until_s=7200.0)]
    longer = Requests(later.arrival_s, later.input_tokens, 2 * later.output_tokens)
    windows += summarise(longer, 600.0, until_s=1200.0)
    found = shifts(windows, pattern_of(windows[:6], 2.0), RULES)
    assert [shift.figure for shift in found] == [Figure.OUTPUT]
    assert found[0].factor == pytest.approx(2.0, rel=0.15)


def test_arrivals_become_bursty_at_an_unchanged_rate() -> None:
    calm = summarise(log_of(5.0, 7200.0), 600.0, until_s=7200.0)
    bursty = summarise(log_of(5.0, 3600.0, cv=4.0), 600.0, until_s=3600.0)
    found = shifts([*calm, *bursty], pattern_of(calm, 5.0), RULES)
    assert Figure.CV in [shift.figure for shift in found]


def test_a_quiet_service_needs_a_larger_change_than_its_own_noise() -> None:
    def told(rate: float) -> bool:
        return bool(shifts(rate_windows([1.5 * rate] * 2, 600.0), Pattern(rate=rate), RULES))

    assert told(10.0)
    assert not told(0.02)  # 12 requests a window: 18 would be nothing strange


def test_within_the_hour_a_shift_waits_unless_arrivals_exceed_the_goodput() -> None:
    windows = rate_windows([15.0, 15.0], 600.0)
    ample = look(windows, serving(1, 100.0, Pattern(rate=10.0)), RULES)
    assert ample.calls
    assert not ample.fires
    assert ample.wait_s == pytest.approx(2400.0)
    scarce = look(windows, serving(1, 12.0, Pattern(rate=10.0)), RULES)
    assert scarce.is_emergency
    assert scarce.fires


def test_a_gap_in_the_log_is_no_fall_of_the_rate_but_a_lasting_silence_is() -> None:
    assert not fires(after(10.0, *[0.0] * 5))
    assert not fires(after(10.0, *[0.0] * 5, 1.0))
    assert fires(after(10.0, *[0.0] * 8))


def test_windows_keep_what_the_requests_say() -> None:
    requests = log_of(2.0, 3600.0, cv=2.0)
    (window,) = summarise(requests, 3600.0, until_s=3600.0)
    inside = requests.arrival_s < 3600.0
    assert window.count == inside.sum()
    assert window.inputs is not None
    assert window.inputs.mean == pytest.approx(requests.input_tokens[inside].mean())
    assert window.gap_cv == pytest.approx(2.0, rel=0.1)


def test_the_unfinished_last_window_is_left_out() -> None:
    assert len(summarise(log_of(2.0, 1500.0), 600.0, until_s=1500.0)) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rules(rate_band=0.0), "rate_band must be above zero, not 0"),
        (lambda: Rules(quantile=1.0), "the quantile must lie between 0 and 1, not 1"),
        (lambda: Rules(lookback_s=600.0), "must hold two windows of 600 s, not 600 s"),
        (lambda: SwitchRates(load_bytes_per_s=0.0), "load_bytes_per_s must be above zero"),
        (lambda: rate_windows([-1.0], 600.0), "a rate must be zero or above, not -1"),
        (lambda: summarise(log_of(2.0, 60.0), 600.0), "less than one window of 600 s"),
    ],
)
def test_bad_input_ends_in_one_sentence(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ReplanError, match=message):
        make()
