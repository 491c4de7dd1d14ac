"""Intervals: they cover as often as they say, also where requests miss together."""

import numpy as np
import pytest

from planner.intervals import effective_size, mean, paired_difference, percentile, share, wilson
from planner.queueing import md1_wait_percentile_s, mg1_wait_s
from planner.workload.requests import Floats
from tests.planner.analytic_queue import poisson, waits_s

SEEDS = range(200)
ENOUGH = 0.92  # of 200 seeds, where 95 % are promised: two standard deviations below


def steady_waits_s(load: float, count: int, seed: int) -> Floats:
    return waits_s(poisson(count, load, seed).arrival_s, 1.0)[count // 10 :]


@pytest.mark.parametrize(
    ("load", "level", "count"),
    [(0.8, 0.9, 2_000), (0.8, 0.98, 2_000), (0.5, 0.95, 2_000), (0.9, 0.9, 4_000)],
)
def test_intervals_of_attainment_cover_the_true_one_of_a_busy_queue(
    load: float, level: float, count: int
) -> None:
    target_s = md1_wait_percentile_s(load, 1.0, level)
    covered = 0
    for seed in SEEDS:
        found_s = steady_waits_s(load, count, seed)
        interval = share(found_s <= target_s, found_s)
        covered += interval.low <= level <= interval.high
    assert covered >= ENOUGH * len(SEEDS)


def test_intervals_that_take_requests_for_independent_would_cover_far_too_little() -> None:
    target_s = md1_wait_percentile_s(0.8, 1.0, 0.9)
    covered = 0
    for seed in SEEDS:
        hits = steady_waits_s(0.8, 2_000, seed) <= target_s
        interval = wilson(int(hits.sum()), len(hits))
        covered += interval.low <= 0.9 <= interval.high
    assert covered < 0.6 * len(SEEDS)


def test_intervals_of_the_mean_wait_cover_it() -> None:
    found = [mean(steady_waits_s(0.7, 8_000, seed)) for seed in SEEDS]
    covered = sum(i.low <= mg1_wait_s(0.7, 1.0) <= i.high for i in found)
    assert covered >= 0.9 * len(SEEDS)  # a skewed mean of a long memory


def test_intervals_of_a_percentile_cover_it() -> None:
    true_s = md1_wait_percentile_s(0.7, 1.0, 0.9)
    found = [percentile(steady_waits_s(0.7, 8_000, seed), 0.9) for seed in SEEDS]
    assert sum(i.low <= true_s <= i.high for i in found) >= ENOUGH * len(SEEDS)


def test_independent_requests_count_nearly_in_full() -> None:
    signal = np.random.default_rng(3).random(4_000)
    assert effective_size(signal < 0.9, signal) > 1_000


def test_requests_that_come_in_tens_count_once_for_ten() -> None:
    signal = np.repeat(np.random.default_rng(3).random(4_000), 10)
    assert 1_000 < effective_size(signal < 0.9, signal) <= 6_000


def test_a_run_without_a_miss_is_not_certain_of_the_next_one() -> None:
    signal = np.random.default_rng(0).random(500)
    interval = share(signal < 2, signal)
    assert interval.value == interval.high == 1.0
    assert 0.9 < interval.low < 0.995


def test_a_run_without_a_hit_mirrors_one_without_a_miss() -> None:
    signal = np.random.default_rng(0).random(500)
    none, everyone = share(signal > 2, signal), share(1 - signal < 2, 1 - signal)
    assert none.high == pytest.approx(1 - everyone.low)


def test_a_handful_of_requests_gets_a_wide_interval_not_an_error() -> None:
    interval = share(np.array([True, False, True]), np.array([1.0, 3.0, 2.0]))
    assert interval.low < 0.25
    assert interval.high > 0.9


def test_wilsons_interval_is_as_published() -> None:
    interval = wilson(81, 263)  # Newcombe (1998), table I, method 3
    assert interval.low == pytest.approx(0.2553, abs=5e-4)
    assert interval.high == pytest.approx(0.3662, abs=5e-4)


def test_a_paired_difference_is_sharper_than_its_two_sides() -> None:
    slow_s, fast_s = steady_waits_s(0.8, 4_000, 1), steady_waits_s(0.79, 4_000, 1)
    difference = paired_difference(slow_s, fast_s)
    assert difference.low > 0
    assert difference.half_width < 0.3 * mean(slow_s).half_width


def test_outcomes_that_agree_everywhere_may_still_differ_a_little() -> None:
    hits = np.ones(1_000, dtype=np.bool_)
    difference = paired_difference(hits, hits)
    assert difference.value == 0
    assert 0 < difference.half_width < 0.01


def test_more_confidence_is_wider() -> None:
    signal = np.random.default_rng(0).random(500)
    usual, strict = share(signal < 0.9, signal), share(signal < 0.9, signal, 0.99)
    assert strict.half_width > 1.2 * usual.half_width
