"""How busy a service is said to be: never more than there is, whatever comes in."""

import math

import pytest

from planner.bench.tables import told_load
from planner.simulate.arguments import read_plan
from planner.simulate.predict import predict
from planner.simulate.report import Run

DEPLOYMENT = ("--model", "opt-13b", "--coefficients", "distserve-raw", "--prefill-tp", "2")
ONE_OF_EACH = (*DEPLOYMENT, "--prefill", "1", "--decode", "1", "--ttft", "250ms")


def only_run(*words: str) -> Run:
    plan = read_plan([*ONE_OF_EACH, *words])
    (run,) = predict(plan, lambda _: None).prediction.runs
    return run


@pytest.mark.parametrize("rate", ["20", "1000000"])
def test_an_overrun_pool_is_full_and_not_many_times_full(rate: str) -> None:
    use = only_run("--rate", rate).use
    assert use is not None
    assert 0.5 < use.kv_share <= 1.0
    assert use.sequences <= 256


def test_twenty_requests_at_once_never_decode_as_more_than_twenty() -> None:
    use = only_run("--rate", "1000000", "--num-requests", "20").use
    assert use is not None
    assert 1 < use.sequences < 20


def test_in_the_long_run_sequences_follow_littles_law() -> None:
    run = only_run("--rate", "2", "--num-requests", "2000")
    decode = run.latencies.stages_s["decode"]
    assert run.use is not None
    assert decode is not None
    assert run.use.sequences == pytest.approx(run.rate * decode.mean)


def test_requests_of_one_instant_have_no_rate_to_tell() -> None:
    assert told_load(1, math.inf) == "1 request"
    assert told_load(50, math.inf) == "50 requests all at once"
    assert told_load(50, 2.5) == "50 requests at 2.5 per second"
