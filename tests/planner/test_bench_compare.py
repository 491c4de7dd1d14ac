import numpy as np
import pytest

from ipc.vocabulary import Role
from planner.bench.calibrate import Calibration
from planner.bench.compare import as_sent, compare, simulated
from planner.bench.live_run import Failure
from planner.bench.validation import begins_alike, judge
from planner.simulate.command import as_run
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.verdict import margins
from tests.planner.line_model import chat, instance
from tests.planner.live_runs import answered, run_of

SERVICE = Service((instance(Role.PREFILL), instance(Role.DECODE)))
SLO = Slo(ttft_s=0.2, tpot_s=0.0285)
LOAD = chat(600, rate=6.0)


def test_a_simulator_that_knows_the_truth_is_not_off_at_all() -> None:
    live = as_run(simulate(SERVICE, LOAD))
    found = compare([live], simulated(SERVICE, live), SLO)
    assert 0.5 < found.live.value < 0.97
    assert found.difference.value == 0.0
    assert found.difference.low < 0 < found.difference.high
    assert {name: pair.error for name, pair in found.latencies.items()} == pytest.approx(
        {"TTFT P50": 0, "TTFT P90": 0, "TPOT P50": 0, "TPOT P90": 0}
    )
    assert judge(found).agrees


def test_steps_simulated_too_fast_promise_too_much() -> None:
    live = as_run(simulate(Calibration(1.3, 1.15).apply(SERVICE), LOAD))
    timeline = simulated(SERVICE, live)
    found = compare([live], timeline, SLO)
    hits = [margins(each, SLO) <= 1 for each in (timeline, live.timeline)]
    assert found.difference.value == pytest.approx(hits[0].mean() - hits[1].mean())
    assert 0 < found.difference.low < found.difference.value
    some = LOAD.output_tokens > 1
    ours_s, live_s = (np.percentile(each.tpot_s[some], 90) for each in (timeline, live.timeline))
    assert found.latencies["TPOT P90"].error == pytest.approx(ours_s / live_s - 1)
    verdict = judge(found)
    assert not verdict.agrees
    assert verdict.misses[0].startswith("attainment +")
    assert verdict.misses[0].endswith("points (2.0 are allowed)")
    assert any(miss.startswith("TPOT P90 -1") for miss in verdict.misses)


def test_stages_tell_where_an_error_comes_from() -> None:
    live = as_run(simulate(Calibration(prefill_scale=1.3).apply(SERVICE), LOAD))
    stages = compare([live], simulated(SERVICE, live), SLO).stages
    assert stages["prefill"].error == pytest.approx(1 / 1.3 - 1, abs=0.02)
    assert stages["transfer"].error == pytest.approx(0.0, abs=1e-9)
    silent = run_of([answered(0.1, 0.2, 0.3)])
    assert compare([silent], simulated(SERVICE, silent), SLO).stages == {}


def test_what_replays_differ_by_is_allowed() -> None:
    slow, fast = (
        as_run(simulate(Calibration(decode_scale=scale).apply(SERVICE), LOAD))
        for scale in (1.03, 0.97)
    )
    found = compare([slow, fast], simulated(SERVICE, slow), SLO)
    alone = compare([slow], simulated(SERVICE, slow), SLO)
    shares = [float((margins(run.timeline, SLO) <= 1).mean()) for run in (slow, fast)]
    assert alone.replay_spread is None
    assert found.replay_spread == pytest.approx(shares[1] - shares[0])
    assert found.live.value == pytest.approx(np.mean(shares))
    assert not judge(alone).agrees
    assert judge(found).agrees
    assert judge(found).allowed_points == found.replay_spread


def test_a_request_without_an_answer_missed_and_its_simulated_twin_does_not_count() -> None:
    """A simulated latency is compared where there is a live one, an outcome always."""
    live = run_of([answered(0.05, 0.07, 0.09), Failure(1, "timeout", "late")])
    found = compare([live], simulated(SERVICE, live), SLO)
    assert found.live.value == 0.5
    assert found.simulated.value == 1.0
    assert found.difference.value == 0.5
    assert found.latencies["TTFT P50"].live_s == found.latencies["TTFT P90"].live_s


def test_simulated_requests_have_the_lengths_that_answers_had() -> None:
    short = run_of([answered(0.1, 0.2), Failure(1, "timeout", "late")], output_tokens=3)
    assert as_sent(short).output_tokens.tolist() == [2, 3]


def test_times_of_zero_cannot_be_agreed_with() -> None:
    at_once = run_of([answered(0.1, 0.1, 0.1)])
    found = compare([at_once], simulated(SERVICE, at_once), SLO)
    assert found.latencies["TPOT P50"].error is None
    assert "TPOT P50, which is zero live" in judge(found).misses


def test_requests_are_known_again_at_another_rate() -> None:
    assert begins_alike(LOAD.first(200), LOAD.stretched(3.0).first(200))
    assert not begins_alike(LOAD, chat(600, rate=6.0, seed=1))
