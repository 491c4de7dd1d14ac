"""Goodput: the search finds what is known on paper, in few runs, and says how sure it is."""

import math

import msgspec
import numpy as np
import pytest

from planner.errors import TargetError
from planner.goodput import Goodput, curve, goodput, slo_sweep
from planner.queueing import md1_wait_percentile_s, md1_wait_share
from planner.rate_search import Search
from planner.slo import Slo
from planner.verdict import Effort, Experiment, Run
from tests.planner.analytic_queue import counted, poisson, served

EFFORT = Effort(start=2_000, cap=4_000)
LONG = Effort(start=40_000, cap=40_000)


def true_goodput(wait_s: float, target: float) -> float:
    """By halving: the load of M/D/1 with unit service whose wait meets the target."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        meets = md1_wait_share(middle, 1.0, wait_s) >= target
        low, high = (middle, high) if meets else (low, middle)
    return low


def found_goodput(
    wait_s: float,
    target: float = 0.9,
    *,
    seed: int = 0,
    effort: Effort = EFFORT,
    run: Run | None = None,
    search: Search | None = None,
) -> Goodput:
    slo = Slo(wait_s + 1, 1.0, target)
    service = run or served()
    return goodput(Experiment(service, poisson, slo, seed, effort), 2, search or Search(guess=0.7))


@pytest.mark.parametrize(("wait_s", "target"), [(0.5, 0.7), (1.5, 0.9), (5, 0.9), (9, 0.99)])
def test_the_search_finds_the_analytic_goodput(wait_s: float, target: float) -> None:
    found = found_goodput(wait_s, target, effort=LONG)
    assert found.rate.value == pytest.approx(true_goodput(wait_s, target), rel=0.03)
    assert found.rate.low <= true_goodput(wait_s, target) <= found.rate.high


@pytest.mark.parametrize(("wait_s", "target"), [(5, 0.9), (20, 0.9)])
def test_intervals_of_the_rate_cover_the_analytic_one(wait_s: float, target: float) -> None:
    true_rate = true_goodput(wait_s, target)
    found = [found_goodput(wait_s, target, seed=seed).rate for seed in range(40)]
    assert sum(rate.low <= true_rate <= rate.high for rate in found) >= 36
    assert np.mean([rate.half_width for rate in found]) < 0.12 * true_rate


def test_a_search_takes_about_eight_runs() -> None:
    counts = []
    for seed in range(20):
        run, sizes = counted(served())
        found = found_goodput(3.0, seed=seed, run=run)
        assert found.num_runs == len(sizes)
        assert max(sizes) <= 4_000
        counts.append(len(sizes))
    assert np.mean(counts) < 9
    assert max(counts) <= 12


@pytest.mark.parametrize("guess", [0.001, 0.1, 30.0])
def test_a_bad_guess_costs_runs_but_changes_the_answer_little(guess: float) -> None:
    far, near = found_goodput(3.0, search=Search(guess=guess)), found_goodput(3.0)
    assert far.rate.value == pytest.approx(near.rate.value, rel=0.03)
    assert far.num_runs <= 22


def test_devices_share_the_goodput() -> None:
    found = found_goodput(3.0)
    assert found.per_device.value == found.rate.value / 2
    assert found.per_device.high == found.rate.high / 2


def test_a_stricter_target_has_a_lower_goodput() -> None:
    rates = [found_goodput(3.0, target).rate.value for target in (0.5, 0.8, 0.9, 0.95, 0.99)]
    assert rates == sorted(rates, reverse=True)


def test_what_limits_the_rate_is_named() -> None:
    assert found_goodput(3.0).limited_by.startswith("TTFT")
    lax = found_goodput(1e6)
    assert lax.limited_by.endswith("queues grow without end")
    assert lax.rate.value == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize(("slo", "reason"), [(Slo(0.9, 1.0), "TTFT"), (Slo(9.0, 0.005), "TPOT")])
def test_a_service_too_slow_when_idle_has_no_goodput_and_says_why(slo: Slo, reason: str) -> None:
    found = goodput(Experiment(served(), poisson, slo, 0, EFFORT), 1)
    assert found.rate.value == found.rate.high == 0.0
    assert found.limited_by == f"{reason}: missed even at 0.0001 requests/s"
    assert found.is_bounded


def test_a_service_that_meets_everything_is_unbounded_up_to_the_highest_rate() -> None:
    search = Search(guess=1.0, highest=50.0)
    found = goodput(Experiment(served(1e-9), poisson, Slo(1, 1), 0, EFFORT), 1, search)
    assert not found.is_bounded
    assert (found.rate.value, found.rate.high) == (50.0, math.inf)
    assert found.limited_by == "nothing up to 50 requests/s"


def test_all_tried_rates_are_told_in_rising_order_and_turn_into_json() -> None:
    found = found_goodput(3.0)
    rates = [point.rate for point in found.points]
    assert rates == sorted(rates)
    told = msgspec.to_builtins(found)
    assert told["points"][0]["attainment"]["value"] == found.points[0].attainment.value


def test_a_curve_has_a_band_at_each_rate() -> None:
    points = curve(Experiment(served(), poisson, Slo(4, 1), 0, EFFORT), [0.2, 0.6, 0.9])
    assert [point.rate for point in points] == [0.2, 0.6, 0.9]
    for point in points:
        true_share = md1_wait_share(point.rate, 1.0, 3.0)
        assert point.attainment.low <= true_share <= point.attainment.high
        assert point.ttft.p50.value <= point.ttft.p90.value <= point.ttft.p99.value


def test_the_minimal_scale_is_the_latency_that_the_target_share_keeps_to() -> None:
    sweep = slo_sweep(Experiment(served(), poisson, Slo(2, 1), 0, LONG), 0.7, [0.5, 1, 2, 4])
    true_scale = (1 + md1_wait_percentile_s(0.7, 1.0, 0.9)) / 2
    assert sweep.minimal_scale.value == pytest.approx(true_scale, rel=0.03)
    assert sweep.minimal_scale.low <= true_scale <= sweep.minimal_scale.high
    shares = [point.attainment.value for point in sweep.points]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.3, abs=0.02)  # only those who found nobody


def test_no_scale_helps_an_unstable_service() -> None:
    sweep = slo_sweep(Experiment(served(), poisson, Slo(2, 1), 0, LONG), 1.2, [1, 1000])
    assert not sweep.is_stable
    assert sweep.minimal_scale.value == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Search(guess=0.0),
        lambda: Search(guess=5.0, highest=1.0),
        lambda: Search(tolerance=0.0),
        lambda: found_goodput(1.0, target=1.0),
        lambda: goodput(Experiment(served(), poisson, Slo(1, 1)), 0),
        lambda: slo_sweep(Experiment(served(), poisson, Slo(1, 1)), 1.0, [0.0]),
    ],
)
def test_a_search_that_cannot_be_is_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(TargetError):
        wrong()
