"""Queues on paper against the paper's figures, one another, and a simulated queue."""

import math

import numpy as np
import pytest

from planner.errors import TargetError
from planner.queueing import (
    crossover_rate,
    inter_op_ttft_s,
    intra_op_ttft_s,
    kingman_wait_s,
    md1_wait_percentile_s,
    md1_wait_share,
    mg1_wait_s,
    single_ttft_s,
)
from planner.workload.requests import Floats
from tests.planner.analytic_queue import waits_s

LOADS = tuple(np.arange(1, 10) / 10)


def simulated_waits_s(load: float, count: int = 2_000_000) -> Floats:
    """Seen by Poisson arrivals of unit service; pairs of mirrored gaps cancel most of the noise
    of the arrival rate."""
    draws = np.random.default_rng(7).random(count)
    runs = [waits_s(np.cumsum(-np.log(u) / load), 1.0)[count // 100 :] for u in (draws, 1 - draws)]
    return np.concatenate(runs)


def test_equation_1_gives_the_papers_ttft() -> None:
    expected_s = 0.1 + 5.6 * 0.01 / (2 * 0.44)
    assert single_ttft_s(5.6, 0.1) == pytest.approx(expected_s) == pytest.approx(0.1636, abs=1e-4)


def test_equation_1_diverges_at_full_load_and_is_infinite_beyond() -> None:
    assert single_ttft_s(9.999, 0.1) > 100
    assert single_ttft_s(10, 0.1) == single_ttft_s(20, 0.1) == math.inf


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 1.5, 1.9])
def test_equation_2_is_as_printed_and_stands_up_to_twice_the_rate(rate: float) -> None:
    assert inter_op_ttft_s(rate, 1.0) == pytest.approx(1 + rate / (4 * (2 - rate)))
    assert inter_op_ttft_s(2.0, 1.0) == math.inf


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 1.4])
def test_equation_3_is_as_printed_and_stands_up_to_the_speedup(rate: float) -> None:
    expected_s = 1 / 1.5 + rate / (2 * 1.5 * (1.5 - rate))
    assert intra_op_ttft_s(rate, 1.0, 1.5) == pytest.approx(expected_s)
    assert intra_op_ttft_s(1.5, 1.0, 1.5) == math.inf


def test_without_a_speedup_equation_3_is_equation_1() -> None:
    assert intra_op_ttft_s(0.7, 1.0, 1.0) == single_ttft_s(0.7, 1.0)


@pytest.mark.parametrize("speedup", [1.05, 1.3, 1.6, 1.95])
def test_tensor_parallelism_wins_below_the_crossover_and_pipeline_stages_above(
    speedup: float,
) -> None:
    rate = crossover_rate(0.2, speedup)
    assert 0 < rate < speedup / 0.2
    at_s = inter_op_ttft_s(rate, 0.2)
    assert at_s == pytest.approx(intra_op_ttft_s(rate, 0.2, speedup))
    assert intra_op_ttft_s(0.99 * rate, 0.2, speedup) < inter_op_ttft_s(0.99 * rate, 0.2)
    assert intra_op_ttft_s(1.01 * rate, 0.2, speedup) > inter_op_ttft_s(1.01 * rate, 0.2)


def test_a_perfect_speedup_never_loses_and_none_never_wins() -> None:
    assert crossover_rate(0.5, 2.0) == pytest.approx(4.0)
    assert crossover_rate(0.5, 1.0) == 0.0


def test_replicas_share_the_rate() -> None:
    assert single_ttft_s(12, 0.1, num_replicas=3) == single_ttft_s(4, 0.1)
    assert inter_op_ttft_s(12, 0.1, num_replicas=2) == inter_op_ttft_s(6, 0.1)
    assert intra_op_ttft_s(12, 0.1, 1.5, num_replicas=2) == intra_op_ttft_s(6, 0.1, 1.5)


@pytest.mark.parametrize("load", LOADS)
def test_the_mean_wait_is_that_of_a_simulated_queue_within_one_percent(load: float) -> None:
    assert simulated_waits_s(load).mean() == pytest.approx(mg1_wait_s(load, 1.0), rel=0.01)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_the_waits_are_distributed_as_in_a_simulated_queue(load: float) -> None:
    simulated_s = np.sort(simulated_waits_s(load))
    for wait_s in (0.0, 0.5, 1.7, 4.0, 9.5):
        found = np.searchsorted(simulated_s, wait_s + 1e-9) / len(simulated_s)
        assert md1_wait_share(load, 1.0, wait_s) == pytest.approx(found, abs=0.004)


def test_the_distribution_holds_far_out_where_erlangs_series_cancels() -> None:
    shares = [md1_wait_share(0.95, 1.0, wait_s) for wait_s in (50, 100, 150, 200, 400)]
    misses = 1 - np.array(shares)
    # The tail is exponential; its root of exp(x) = 1 + x/load at load 0.95 is 0.10172.
    assert np.allclose(np.log(misses[:3] / misses[1:4]) / 50, 0.10172, rtol=1e-3)
    assert shares == sorted(shares)


def test_a_percentile_is_where_the_distribution_passes_its_level() -> None:
    wait_s = md1_wait_percentile_s(8, 0.1, 0.9)
    assert md1_wait_share(8, 0.1, wait_s) == pytest.approx(0.9, abs=1e-6)
    assert md1_wait_percentile_s(5, 0.1, 0.4) == 0.0  # half of them find the server idle
    assert md1_wait_percentile_s(10, 0.1, 0.4) == math.inf


def test_service_twice_as_uneven_as_constant_waits_twice_as_long() -> None:
    assert mg1_wait_s(0.5, 1.0, service_scv=1.0) == pytest.approx(2 * mg1_wait_s(0.5, 1.0))
    assert mg1_wait_s(0.5, 1.0, service_scv=1.0) == pytest.approx(1.0)  # M/M/1


def test_bursty_arrivals_wait_longer_and_even_ones_not_at_all() -> None:
    even_s = kingman_wait_s(0.9, 1.0, arrival_scv=0.0, service_scv=0.0)
    bursty_s = kingman_wait_s(0.9, 1.0, arrival_scv=4.0, service_scv=0.0)
    assert even_s == 0.0
    assert bursty_s == pytest.approx(4 * mg1_wait_s(0.9, 1.0))


@pytest.mark.parametrize(("rate", "service_s"), [(-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_a_queue_that_cannot_be_is_refused(rate: float, service_s: float) -> None:
    with pytest.raises(TargetError, match="a queue needs"):
        mg1_wait_s(rate, service_s)
