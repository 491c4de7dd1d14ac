"""The simulator against what the paper's authors published: their search, and their measurements.

Nothing here is tuned to the curves: DistServe's steps are its raw fits, L_m follows from them, and
vLLM's engine overhead is what the authors' own factors add for OPT-13B.
"""

from functools import cache

import numpy as np
import pytest

from ipc.vocabulary import Parallelism
from planner.devices import device_sheet
from planner.latency.published import DEVICE, published_fit
from planner.memory import kv_capacity
from planner.model_catalog import model_shape
from planner.paper_curves import (
    SimulatedPoint,
    crossing,
    published_curve,
    simulated_curve,
)
from planner.workload.catalogue import parse_workload
from tests.planner.reference_search import Coefficients, Fits, Reference, bisect_rate

SHAPES = [Parallelism(1, 1), Parallelism(2, 1), Parallelism(1, 2)]
Shapes = tuple[Parallelism, Parallelism]
BEST = (Parallelism(2, 1), Parallelism(1, 1))
SEEDS = range(20)


@cache
def fits(tp: int) -> Fits:
    """As shipped, which is what its search runs on."""
    fit = published_fit("distserve", "opt-13b", tp)

    def milliseconds(*seconds: float) -> Coefficients:
        a, b, c = (1000 * value for value in seconds)
        return a, b, c

    prefill, small, large = fit.prefill, fit.decode.small, fit.decode.large
    return Fits(
        milliseconds(prefill.base_s, prefill.per_token_s, prefill.per_square_s),
        milliseconds(small.base_s, small.per_token_s, small.per_sequence_s),
        milliseconds(large.base_s, large.per_token_s, large.per_sequence_s),
    )


def p90s(shapes: Shapes, per_device: float, count: int, seed: int) -> tuple[float, float]:
    """P90 of TTFT and of TPOT in seconds."""
    prefill, decode = shapes
    rate = per_device * (prefill.num_workers + decode.num_workers)
    room = kv_capacity(model_shape("opt-13b"), device_sheet(DEVICE), prefill).num_tokens
    reference = Reference((fits(prefill.tp), prefill.pp), (fits(decode.tp), decode.pp), room)
    ttft_s, tpot_s = reference.run(parse_workload("sharegpt").requests(count, rate, seed))
    return float(np.percentile(ttft_s, 90)), float(np.percentile(tpot_s, 90))


def searched(shapes: Shapes, seed: int) -> float:
    """Its search of one placement: OPT-13B, 200 / 100 ms, 300 requests."""

    def passes(per_device: float) -> bool:
        ttft_s, tpot_s = p90s(shapes, per_device, 300, seed)
        return ttft_s < 0.2 and tpot_s < 0.1

    return bisect_rate(passes)


def test_its_search_finds_its_published_placement() -> None:
    found = {(p, d): max(searched((p, d), seed) for seed in (0, 1)) for p in SHAPES for d in SHAPES}
    assert max(found, key=lambda shapes: found[shapes]) == BEST


def test_its_published_rate_is_one_of_those_that_its_search_finds() -> None:
    """1.56 per GPU. One run of 300 requests may say anything from 1.25 to 2.5, by its seed."""
    found = [searched(BEST, seed) for seed in range(12)]
    assert min(found) <= 1.5625 <= max(found)
    assert np.median(found) == pytest.approx(1.5625, abs=0.4)


def test_its_placement_fails_when_the_run_is_long_enough() -> None:
    """300 requests end before the decode stage is out of memory; 3,000 do not."""
    assert np.mean([p90s(BEST, 1.5625, 300, seed)[1] for seed in range(5)]) < 0.1
    assert min(p90s(BEST, 1.5625, 3000, seed)[1] for seed in range(3)) > 0.1


@cache
def simulated(model: str, engine: str) -> list[SimulatedPoint]:
    return simulated_curve(published_curve(model, "sharegpt", engine), SEEDS)


@pytest.mark.parametrize(("model", "measured"), [("opt-13b", 2.30), ("opt-66b", 0.955)])
def test_goodput_is_within_a_tenth_of_the_measured_one(model: str, measured: float) -> None:
    curve = published_curve(model, "sharegpt", "distserve")
    assert curve.goodput() == pytest.approx(measured, rel=0.01)
    points = simulated(model, "distserve")
    ours = crossing([p.per_device_rate for p in points], [p.mean for p in points], 90.0)
    assert ours == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("model", ["opt-13b", "opt-66b"])
def test_every_measured_point_lies_in_the_band_of_twenty_seeds(model: str) -> None:
    curve = published_curve(model, "sharegpt", "distserve")
    points = simulated(model, "distserve")
    outside = [
        (point, ours)
        for point, ours in zip(curve.points, points, strict=True)
        if not ours.holds(point)
    ]
    assert not outside
    assert sum(point.is_decided for point in points) >= 4


def test_the_mean_error_over_vllms_points_is_at_most_five() -> None:
    """Over a hundred seeds: +3.1 points; without the signs 5.1."""
    errors = np.array(
        [
            ours.mean - point.attainment
            for model in ("opt-13b", "opt-66b")
            for point, ours in zip(
                published_curve(model, "sharegpt", "vllm").points,
                simulated(model, "vllm"),
                strict=True,
            )
        ]
    )
    assert len(errors) == 17
    assert abs(errors.mean()) <= 5
    assert np.abs(errors).mean() <= 6.5
