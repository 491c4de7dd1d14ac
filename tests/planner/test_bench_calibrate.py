"""Calibration against runs whose truth is known: simulated ones with hidden corrections."""

import numpy as np
import pytest

from ipc.vocabulary import Role
from planner.bench.calibrate import Calibration, calibrate
from planner.bench.live_run import LiveRun
from planner.errors import BenchError
from planner.latency.interface import Slowest
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.simulator.timeline import Timeline
from tests.planner.line_model import LineModel, chat, instance

SERVICE = Service((instance(Role.PREFILL), instance(Role.DECODE)))
TWO_STAGES = LineModel(num_stages=2, slowest=Slowest(prefill=1.3, decode=1.4))


def as_live(timeline: Timeline) -> LiveRun:
    requests = timeline.requests
    return LiveRun(
        requests=requests,
        sent_s=requests.arrival_s,
        is_answered=np.ones(len(requests), dtype=np.bool_),
        timeline=timeline,
        failures=(),
        gaps_s=np.empty(0),
        num_events=None,
        is_counted=True,
        duration_s=float(timeline.last_token_s.max()),
    )


@pytest.mark.parametrize(
    "truth",
    [
        Calibration(),
        Calibration(1.12, 1.3, 0.004, 0.002),
        Calibration(0.9, 0.95, 0.0, 0.01),
        Calibration(1.1, 1.0, 0.004, 0.002, prefill_step_s=0.008),
    ],
    ids=["as profiled", "slower", "faster", "slower by the step"],
)
def test_hidden_corrections_are_found(truth: Calibration) -> None:
    live = as_live(simulate(truth.apply(SERVICE), chat(300, rate=4.0)))
    found = calibrate(live, SERVICE)
    assert found.prefill_scale == pytest.approx(truth.prefill_scale, rel=0.01)
    assert found.decode_scale == pytest.approx(truth.decode_scale, rel=0.01)
    assert found.prefill_step_s == pytest.approx(truth.prefill_step_s, abs=1e-3)
    assert found.arrival_s == pytest.approx(truth.arrival_s, abs=2e-4)
    assert found.handover_s == pytest.approx(truth.handover_s, abs=2e-3)
    assert found.num_requests == 300


@pytest.mark.parametrize(
    "service",
    [
        Service((instance(Role.MIXED),)),
        Service((instance(Role.PREFILL, TWO_STAGES), instance(Role.DECODE, TWO_STAGES))),
    ],
    ids=["one colocated instance", "pipelines of unequal stages"],
)
def test_waits_for_prompts_and_for_other_micro_batches_are_no_slower_steps(
    service: Service,
) -> None:
    truth = Calibration(1.12, 1.3)
    live = as_live(simulate(truth.apply(service), chat(300, rate=3.0)))
    found = calibrate(live, service)
    assert found.prefill_scale == pytest.approx(1.12, rel=0.02)
    assert found.decode_scale == pytest.approx(1.3, rel=0.05)


def test_what_was_found_on_one_run_predicts_another_one() -> None:
    truth = Calibration(1.12, 1.3, 0.004, 0.002)
    found = calibrate(as_live(simulate(truth.apply(SERVICE), chat(300, rate=3.0))), SERVICE)
    other = chat(600, rate=6.0, seed=5)
    live, predicted = simulate(truth.apply(SERVICE), other), simulate(found.apply(SERVICE), other)
    for share in (50, 90):
        for times in ("ttft_s", "tpot_s"):
            ours, theirs = getattr(predicted, times), getattr(live, times)
            assert np.percentile(ours, share) == pytest.approx(
                np.percentile(theirs, share), rel=0.03
            )


def test_too_few_answers_do_not_calibrate() -> None:
    with pytest.raises(BenchError, match="needs 50 answered requests at least, and got 20"):
        calibrate(as_live(simulate(SERVICE, chat(20, 1.0))), SERVICE)


def test_a_service_that_tells_no_stages_does_not_calibrate() -> None:
    timeline = simulate(SERVICE, chat(60, 1.0))
    silent = Timeline(
        timeline.requests,
        timeline.first_token_s,
        timeline.last_token_s,
        *[np.full(60, np.nan)] * 5,
    )
    with pytest.raises(BenchError, match="does not tell them"):
        calibrate(as_live(silent), SERVICE)
