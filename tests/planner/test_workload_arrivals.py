"""Arrival processes: rates, variation, dispersion, and what a trace keeps when resampled."""

from pathlib import Path

import numpy as np
import pytest

from planner.errors import WorkloadError
from planner.workload.arrival_fit import ArrivalFit, fit_arrivals
from planner.workload.arrivals import Evenly, Modulated, Renewal, Replay, Resampled
from planner.workload.burstiness import dispersion, gap_cv
from planner.workload.gap_families import GapFamily, fit_gaps, ks_distance
from planner.workload.requests import Floats, Requests
from planner.workload.rows import Blocks, Independent
from planner.workload.tables import load_table
from planner.workload.trace_file import read_trace

RAW_DIR = Path(__file__).resolve().parents[3] / "shared" / "data"
RAW_FILES = {
    "azure-conv": "azure_2023_conv.csv",
    "azure-code": "azure_2023_code.csv",
    "mooncake-conversation": "mooncake_conversation.csv",
}


def raw_trace(name: str) -> Requests:
    path = RAW_DIR / RAW_FILES[name]
    if not path.exists():
        pytest.skip(f"the raw data are not here: {path.name}")
    return read_trace(path)


def shipped_fit(name: str) -> ArrivalFit:
    fit = load_table(name).arrivals
    assert fit is not None
    return fit


def two_sample_distance(one: Floats, other: Floats) -> float:
    values = np.concatenate([one, other])
    below = [np.searchsorted(np.sort(side), values, "right") / len(side) for side in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def drifting(num: int = 6000) -> Floats:
    """Poisson arrivals whose rate swings between 2 and 8 a second every 200 s."""
    unit = np.cumsum(np.random.default_rng(5).exponential(size=num))
    times_s = np.linspace(0, 4000, 400_001)
    swing = 5 * times_s + 3 * 200 / (2 * np.pi) * (1 - np.cos(2 * np.pi * times_s / 200))
    return np.interp(unit, swing, times_s)


def test_fixed_arrivals_are_evenly_spaced() -> None:
    assert np.diff(Evenly().times(100, 0)).tolist() == [1.0] * 99


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gamma_gaps_have_mean_one_and_the_cv_asked_for(cv: float) -> None:
    times_s = Renewal.with_cv(cv).times(200_000, 7)
    # Standard error of the mean: cv / sqrt(n); 4 of them.
    assert times_s[-1] / len(times_s) == pytest.approx(1.0, abs=4 * cv / 200_000**0.5)
    assert gap_cv(times_s) == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential_and_counts_disperse_like_poisson() -> None:
    times_s = Renewal.with_cv(1.0).times(50_000, 3)
    # 1.63 / sqrt(n) is the 1 % point of the Kolmogorov-Smirnov distance.
    assert ks_distance(1 - np.exp(-np.sort(np.diff(times_s)))) < 1.63 / 50_000**0.5
    assert dispersion(times_s, 10.0) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("family", list(GapFamily))
@pytest.mark.parametrize("shape", [0.4, 1.0, 3.0])
def test_the_fit_finds_family_and_shape_that_gaps_were_drawn_from(
    family: GapFamily, shape: float
) -> None:
    gaps = family.draw(shape, 20_000, np.random.default_rng(11))
    best, other = fit_gaps(gaps / gaps.mean())
    assert best.shape == pytest.approx(shape, rel=0.03)
    assert best.ks_distance < 1.63 / 20_000**0.5
    # At shape 1 both are the exponential distribution, and either will do.
    assert best.family is family or shape == 1.0
    assert shape == 1.0 or best.aic < other.aic


@pytest.mark.parametrize("family", list(GapFamily))
def test_a_family_draws_the_spread_and_distribution_it_says(family: GapFamily) -> None:
    gaps = family.draw(0.7, 100_000, np.random.default_rng(2))
    assert gaps.mean() == pytest.approx(1.0, abs=0.02)
    assert gaps.var() == pytest.approx(family.squared_cv(0.7), rel=0.05)
    assert ks_distance(family.cdf(0.7, np.sort(gaps))) < 1.63 / 100_000**0.5


def test_a_drifting_rate_is_found_and_the_gaps_within_are_poisson() -> None:
    times_s = drifting()
    fit = fit_arrivals(times_s)
    best = fit.gaps[0]
    assert best.shape == pytest.approx(1.0, abs=0.05)
    middle_s = (np.arange(len(fit.window_rates)) + 0.5) * fit.window_s + times_s[0]
    truth = 5 + 3 * np.sin(2 * np.pi * middle_s / 200)
    assert np.corrcoef(fit.window_rates, truth)[0, 1] > 0.9
    assert fit.window_s == pytest.approx(10, rel=0.01)


def test_steady_poisson_arrivals_are_not_mistaken_for_drift() -> None:
    fit = fit_arrivals(np.cumsum(np.random.default_rng(1).exponential(size=5000)))
    observed = np.random.default_rng(1).poisson(fit.window_s, 5000).std() / fit.window_s
    assert np.std(fit.window_rates) < 0.6 * observed


def test_fitted_arrivals_keep_rate_cv_and_dispersion_of_their_trace() -> None:
    times_s = drifting()
    fit = fit_arrivals(times_s)
    drawn = [Modulated(fit).times(len(times_s), seed) for seed in range(20)]
    rate = np.mean([len(run) / run[-1] for run in drawn])
    assert rate == pytest.approx(fit.rate, rel=0.02)
    assert np.mean([gap_cv(run) for run in drawn]) == pytest.approx(fit.gap_cv, rel=0.05)
    for bin_s in (1.0, 10.0, 60.0):
        mean_idc = np.mean([dispersion(run, bin_s) for run in drawn])
        assert mean_idc == pytest.approx(fit.idc[f"{bin_s:g}"], rel=0.2)


def test_a_renewal_fit_alone_would_miss_the_drift() -> None:
    """The reason for the rate's windows: gaps of the right CV, a fraction of the dispersion."""
    times_s = drifting()
    renewal = Renewal.with_cv(gap_cv(times_s)).times(len(times_s), 0) / 5
    idc, trace_idc = dispersion(renewal, 60.0), dispersion(times_s, 60.0)
    assert idc is not None
    assert trace_idc is not None
    assert idc < 0.25 * trace_idc


def test_fitted_azure_conversations_have_the_gaps_and_dispersion_of_the_raw_trace() -> None:
    raw = raw_trace("azure-conv")
    fit = shipped_fit("azure-conv")
    runs = [Modulated(fit).times(len(raw), seed) for seed in range(5)]
    gaps = np.concatenate([np.diff(run) for run in runs])
    assert two_sample_distance(gaps, np.diff(raw.arrival_s)) < 0.02
    assert np.mean([gap_cv(run) for run in runs]) == pytest.approx(1.094, abs=0.03)
    for bin_s in (1.0, 10.0, 60.0):
        raw_idc = dispersion(raw.arrival_s, bin_s)
        assert raw_idc is not None
        assert np.mean([dispersion(run, bin_s) for run in runs]) == pytest.approx(raw_idc, rel=0.2)


@pytest.mark.parametrize("name", RAW_FILES)
def test_the_shipped_fit_is_that_of_the_raw_trace(name: str) -> None:
    again = fit_arrivals(raw_trace(name).arrival_s)
    shipped = shipped_fit(name)
    assert again.gaps[0].family is shipped.gaps[0].family
    assert again.gaps[0].shape == pytest.approx(shipped.gaps[0].shape, rel=1e-3)
    assert again.rate == pytest.approx(shipped.rate)


def test_a_clock_of_coarse_steps_is_noticed_and_not_taken_for_bursts() -> None:
    fine = np.cumsum(np.random.default_rng(4).exponential(0.3, size=5000))
    fit = fit_arrivals(np.floor(fine / 3) * 3)
    assert fit.clock_step_s == 3.0
    assert fit.gaps[0].shape == pytest.approx(1.0, abs=0.1)
    assert shipped_fit("azure-conv").clock_step_s is None


def test_a_short_trace_and_one_without_time_are_not_fitted() -> None:
    with pytest.raises(WorkloadError, match="at least 50 requests at different times"):
        fit_arrivals(np.arange(49.0))
    with pytest.raises(WorkloadError, match="this trace has 60 over 0 s"):
        fit_arrivals(np.full(60, 3.0))


def test_a_trace_of_years_is_not_fitted() -> None:
    with pytest.raises(WorkloadError, match=r"at most 1e\+07 s; this one spans 5\.9e\+07 s"):
        fit_arrivals(np.arange(60) * 1e6)


def test_fitted_times_never_fall_and_start_near_zero() -> None:
    for seed in range(20):
        times_s = Modulated(shipped_fit("azure-code")).times(3000, seed)
        assert times_s[0] >= 0
        assert (np.diff(times_s) >= 0).all()


def test_a_replay_goes_on_from_the_start_one_mean_gap_later() -> None:
    trace = Requests(np.array([1.0, 2.0, 5.0]), np.ones(3, np.int64), np.ones(3, np.int64))
    assert Replay(trace).times(7, 0).tolist() == [1.0, 2.0, 5.0, 7.0, 8.0, 11.0, 13.0]


def test_blocks_keep_neighbours_together_and_use_every_row_alike() -> None:
    rows = Blocks(20).pick(200_000, 500, 1)
    assert float(np.mean(np.diff(rows) % 500 == 1)) > 0.94
    counts = np.bincount(rows, minlength=500)
    assert counts.min() > 0.5 * counts.mean()


def test_resampling_keeps_gaps_and_dispersion_while_single_rows_lose_it() -> None:
    times_s = drifting()
    trace = Requests(times_s, np.ones(6000, np.int64), np.ones(6000, np.int64))
    blocks, single = (
        [dispersion(Resampled(trace, picks).times(6000, s), 60.0) or 0.0 for s in range(10)]
        for picks in (Blocks(600), Independent())
    )
    trace_idc = dispersion(times_s, 60.0)
    assert trace_idc is not None
    assert np.mean(blocks) == pytest.approx(trace_idc, rel=0.25)
    assert np.mean(single) < 0.25 * trace_idc
    gaps = np.diff(Resampled(trace, Blocks(600)).times(6000, 0))
    assert two_sample_distance(gaps, np.diff(times_s)) < 0.04
