"""Verdicts at one rate: what counts, when it is enough, and what is not stable."""

import numpy as np
import pytest

from planner.errors import TargetError
from planner.queueing import md1_wait_percentile_s, md1_wait_share
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.verdict import Effort, Experiment, Verdict, attainment_at, queue_growth, steady
from planner.workload.requests import Requests
from tests.planner.analytic_queue import counted, poisson, served

EFFORT = Effort(start=2_000, cap=8_000)


def experiment(wait_s: float, *, target: float = 0.9, seed: int = 0) -> Experiment:
    """M/D/1 with unit prefills that may wait for `wait_s`."""
    return Experiment(served(), poisson, Slo(wait_s + 1, 1.0, target), seed, EFFORT)


@pytest.mark.parametrize("target", [0.9, 0.85])
def test_the_sequential_rule_still_covers_the_true_attainment_in_9_of_10_seeds(
    target: float,
) -> None:
    wait_s = md1_wait_percentile_s(0.8, 1.0, 0.9)
    points = [attainment_at(experiment(wait_s, target=target, seed=s), 0.8) for s in range(100)]
    assert sum(p.attainment.low <= 0.9 <= p.attainment.high for p in points) >= 90
    assert not any(p.verdict is Verdict.MISSES for p in points if target < 0.9)
    assert sum(p.verdict is not Verdict.UNDECIDED for p in points if target == 0.9) <= 10


def test_a_rate_far_from_the_knee_takes_one_short_run() -> None:
    easy, hard = attainment_at(experiment(5.0), 0.3), attainment_at(experiment(0.5), 0.9)
    assert (easy.verdict, hard.verdict) == (Verdict.MEETS, Verdict.MISSES)
    assert easy.num_requests == hard.num_requests == 2_000
    assert easy.num_runs == hard.num_runs == 1


def test_a_rate_at_the_knee_takes_runs_of_double_length_up_to_the_cap() -> None:
    run, sizes = counted(served())
    wait_s = md1_wait_percentile_s(0.8, 1.0, 0.9)
    point = attainment_at(Experiment(run, poisson, Slo(wait_s + 1, 1), 0, EFFORT), 0.8)
    assert sizes == [2_000, 4_000, 8_000]
    assert point.num_runs == 3


def test_a_sharp_interval_ends_the_doubling_though_the_verdict_is_open() -> None:
    target = md1_wait_share(0.05, 1.0, 0.0)  # nearly independent: 5 % find another one there
    loose = Effort(start=2_000, cap=64_000, half_width=0.02)
    point = attainment_at(Experiment(served(), poisson, Slo(1.0, 1, target), 0, loose), 0.05)
    assert point.attainment.half_width < 0.02
    assert point.num_requests < 64_000


@pytest.mark.parametrize("load", [1.1, 1.5, 4.0])
def test_an_overloaded_queue_is_unstable_however_kind_the_slo(load: float) -> None:
    point = attainment_at(experiment(1e6), load)
    assert point.verdict is Verdict.MISSES
    assert not point.is_stable
    assert not point.meets
    assert point.queue_growth == pytest.approx(load - 1, abs=0.06)


def test_a_busy_queue_is_rarely_taken_for_unstable() -> None:
    loads = {0.8: 0, 0.95: 0}
    for load in loads:
        runs = [served()(poisson(2_000, load, seed)) for seed in range(200)]
        loads[load] = sum(queue_growth(run)[1] for run in runs)
    assert loads[0.8] == 0
    assert loads[0.95] <= 6


def test_a_decode_batch_that_still_fills_up_is_not_a_growing_queue() -> None:
    """Long answers: nobody leaves while all arrive, latencies rise, but nobody queues."""

    def run(requests: Requests) -> Timeline:
        end_s = requests.arrival_s + 0.01
        last_s = end_s + np.minimum(0.5 * requests.arrival_s, 1_000) + 1
        return Timeline(requests, end_s, last_s, requests.arrival_s, end_s, end_s, end_s, end_s)

    timeline = run(poisson(2_000, 1.0, 0))
    assert queue_growth(timeline) == (0.0, False)
    assert not steady(timeline).is_settled


def test_neither_the_first_tenth_nor_the_drain_counts() -> None:
    timeline = served(prefill_s=0.1, token_s=1.0)(poisson(2_000, 5.0, 0))
    window = steady(timeline)
    assert window.is_settled
    assert window.first == 200
    last_arrival_s = timeline.requests.arrival_s[-1]
    lifetime_s = timeline.last_token_s - timeline.requests.arrival_s
    assert timeline.requests.arrival_s[window.last - 1] <= last_arrival_s - lifetime_s.min()
    assert window.last > 1_900


def test_the_warm_up_lasts_at_least_as_long_as_a_request() -> None:
    timeline = served(prefill_s=0.01, token_s=8.0)(poisson(2_000, 5.0, 0))
    first_s = timeline.requests.arrival_s[steady(timeline).first]
    assert first_s >= 80.0


def test_a_run_shorter_than_its_requests_is_not_settled_and_is_doubled() -> None:
    run, sizes = counted(served(prefill_s=0.01, token_s=30.0))
    point = attainment_at(Experiment(run, poisson, Slo(1, 40), 0, EFFORT), 5.0)
    assert sizes == [2_000, 4_000, 8_000]
    assert point.verdict is Verdict.MEETS


def test_attainment_falls_as_the_rate_rises() -> None:
    rates = np.arange(0.1, 1.0, 0.05)
    once = Effort(start=4_000, cap=4_000)
    found = [
        attainment_at(Experiment(served(), poisson, Slo(3, 1), 5, once), float(rate))
        for rate in rates
    ]
    shares = [point.attainment.value for point in found]
    assert shares == sorted(shares, reverse=True)


def test_the_margin_is_one_where_the_attainment_is_the_target() -> None:
    wait_s = md1_wait_percentile_s(0.7, 1.0, 0.9)
    large = Effort(start=64_000, cap=64_000)
    point = attainment_at(Experiment(served(), poisson, Slo(wait_s + 1, 1), 0, large), 0.7)
    assert point.margin.value == pytest.approx(1.0, abs=0.03)
    assert point.margin.low < 1 < point.margin.high
    assert (point.margin.value <= 1) == (point.attainment.value >= 0.9)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(TargetError, match="a request rate must be above zero and finite"):
        attainment_at(experiment(1.0), rate)


@pytest.mark.parametrize(("start", "cap"), [(10, 1_000), (4_000, 2_000)])
def test_an_effort_that_cannot_be_is_refused(start: int, cap: int) -> None:
    with pytest.raises(TargetError, match="at least 100 requests"):
        Effort(start, cap)
