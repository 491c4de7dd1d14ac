import math

import pytest

from planner.bench.sweep import SweepPoint, next_rate, sweep_goodput
from planner.bench.tables import told_goodput
from planner.intervals import Interval


def points(*measured: tuple[float, float], half: float = 0.02) -> list[SweepPoint]:
    return [
        SweepPoint(rate, Interval(value, value - half, min(1.0, value + half)))
        for rate, value in measured
    ]


def test_goodput_is_where_the_curve_crosses_the_target() -> None:
    found = sweep_goodput(points((1, 1.0), (2, 0.95), (4, 0.75)), 0.9)
    assert found.rate == pytest.approx(2.5)
    assert found.low == pytest.approx(2 + 2 * 0.03 / 0.2)
    assert found.high == pytest.approx(2 + 2 * 0.07 / 0.2)
    assert found.is_bounded


def test_the_order_of_the_runs_does_not_matter() -> None:
    measured = points((1, 1.0), (2, 0.95), (4, 0.75))
    assert sweep_goodput(measured[::-1], 0.9) == sweep_goodput(measured, 0.9)


def test_a_dip_below_the_target_is_weighed_against_what_follows() -> None:
    """0.88 at 2 and 0.94 at 3 become 0.91 at both: noise must not end the curve at 2."""
    found = sweep_goodput(points((1, 1.0), (2, 0.88), (3, 0.94), (4, 0.5)), 0.9)
    assert found.rate == pytest.approx(3 + 0.01 / 0.41)


def test_a_target_that_is_always_met_gives_a_lower_bound() -> None:
    found = sweep_goodput(points((1, 1.0), (2, 0.99)), 0.9)
    assert (found.rate, found.high, found.is_bounded) == (2, None, False)
    assert told_goodput(found, 0.9) == (
        "goodput: at least 2 requests per second at 90% attainment "
        "(95 %: 2 to above the highest tried)"
    )


def test_a_target_that_is_never_met_gives_an_upper_bound() -> None:
    found = sweep_goodput(points((1, 0.5), (2, 0.3)), 0.9)
    assert (found.rate, found.low, found.high) == (None, None, 1)
    assert "below the lowest rate that was tried (at most 1" in told_goodput(found, 0.9)


def test_a_sweep_doubles_until_it_misses_and_halves_what_lies_between() -> None:
    assert next_rate([], 0.9, start=3.0) == 3.0
    assert next_rate(points((3, 1.0)), 0.9, start=3.0) == 6.0
    between = next_rate(points((3, 1.0), (6, 0.4)), 0.9, start=3.0)
    assert between == pytest.approx(math.sqrt(18))
    assert next_rate(points((3, 1.0), (6, 0.4), (4.2, 0.8), (3.9, 0.97)), 0.9, start=3.0) is None


def test_a_sweep_that_begins_too_high_comes_down() -> None:
    assert next_rate(points((3, 0.2)), 0.9, start=3.0) == 1.5
    assert next_rate(points((3, 0.2), (1.5, 0.95)), 0.9, start=3.0) == pytest.approx(math.sqrt(4.5))


def test_a_service_that_meets_nothing_ends_the_sweep() -> None:
    rate: float | None = 1.0
    tried: list[SweepPoint] = []
    while rate is not None and len(tried) < 30:
        tried += points((rate, 0.0), half=0.0)
        rate = next_rate(tried, 0.9, start=1.0)
    assert len(tried) < 15


def test_a_sweep_finds_the_knee_of_a_known_curve() -> None:
    tried: list[SweepPoint] = []
    while (rate := next_rate(tried, 0.9, start=1.0)) is not None:
        tried += points((rate, 1 / (1 + math.exp(3 * (rate - 7.0)))))
    knee = 7.0 - math.log(9) / 3
    found = sweep_goodput(tried, 0.9)
    assert found.rate == pytest.approx(knee, rel=0.1)
    assert len(tried) <= 9
