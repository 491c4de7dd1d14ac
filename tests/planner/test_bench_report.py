import numpy as np
import pytest

from planner.bench.events import Answer, StageTimes
from planner.bench.live_run import Failure
from planner.bench.report import Failed, Summary, keeps_up, latencies, summarise
from planner.slo import Slo
from tests.planner.live_runs import answered, run_of

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


def test_latencies_are_those_of_the_events() -> None:
    run = run_of([answered(0.4, 0.5, 0.7), answered(1.2, 1.3, 1.4)])
    known = summarise(run, SLO)
    assert known.latencies.ttft_s is not None
    assert known.latencies.ttft_s.mean == pytest.approx((0.4 + 0.2) / 2)
    assert known.latencies.tpot_s is not None
    assert known.latencies.tpot_s.mean == pytest.approx((0.15 + 0.1) / 2)
    assert known.latencies.end_to_end_s is not None
    assert known.latencies.end_to_end_s.mean == pytest.approx((0.7 + 0.4) / 2)
    assert known.inter_token_s is not None
    assert known.inter_token_s.mean == pytest.approx((0.1 + 0.2 + 0.1 + 0.1) / 4)
    assert known.inter_token_s.p50 == pytest.approx(0.1)


def test_percentiles_of_a_hundred_and_one_answers_are_exact() -> None:
    run = run_of([answered(k + k / 100, k + 2.0) for k in range(101)], output_tokens=2)
    ttft_s = latencies(run.timeline).ttft_s
    assert ttft_s is not None
    assert (ttft_s.p50, ttft_s.p90, ttft_s.p99) == pytest.approx((0.5, 0.9, 0.99))


def test_a_failed_request_meets_no_target() -> None:
    failure = Failure(3, "http_429", "full")
    good, slow_start, slow_steps = (
        answered(0.1, 0.2, 0.3),
        answered(1.6, 1.7, 1.8),
        answered(2.1, 2.3, 2.5),
    )
    known = summarise(run_of([good, slow_start, slow_steps, failure]), SLO)
    assert known.attainment.value == pytest.approx(1 / 4)
    assert known.ttft_attainment.value == pytest.approx(2 / 4)
    assert known.tpot_attainment.value == pytest.approx(2 / 4)
    assert known.attainment.low < 0.25 < known.attainment.high
    assert known.num_answered == 3
    assert known.failures == {"http_429": Failed(1, "full")}


def test_failures_are_counted_by_kind_with_the_first_ones_words() -> None:
    failures = [Failure(0, "timeout", "a"), Failure(1, "http_429", "b"), Failure(2, "timeout", "c")]
    known = summarise(run_of(failures), SLO)
    assert known.failures == {"timeout": Failed(2, "a"), "http_429": Failed(1, "b")}
    assert known.latencies.ttft_s is None
    assert known.attainment.value == 0.0


def test_throughput_is_over_the_whole_run() -> None:
    known = summarise(run_of([answered(0.1, 0.2, 0.3), answered(1.1, 1.2, 1.3)]), SLO)
    assert known.answers_per_s == pytest.approx(0.2)
    assert known.input_tokens_per_s == pytest.approx(2.0)
    assert known.output_tokens_per_s == pytest.approx(0.6)
    assert known.rate == pytest.approx(1.0)


def test_stages_are_told_where_the_service_tells_them() -> None:
    stages = StageTimes(0.1, 0.2, 0.01, 0.02, 0.3)
    run = run_of([answered(0.5, 0.9, stages=stages), answered(1.5, 1.6)], output_tokens=2)
    told = {name: stage.mean for name, stage in latencies(run.timeline).stages_s.items()}
    assert told == pytest.approx(
        {
            "prefill_queue": 0.5 - 0.2,  # with the way to the service and back
            "prefill": 0.2,
            "transfer": 0.01,
            "decode_queue": 0.02,
            "decode": 0.4 - 0.03,
        }
    )
    assert latencies(run_of([answered(0.5, 0.9)]).timeline).stages_s == {}


def test_answers_of_one_token_have_no_time_per_token_but_meet_its_target() -> None:
    known = summarise(run_of([answered(0.1)], output_tokens=1), SLO)
    assert known.latencies.tpot_s is None
    assert known.tpot_attainment.value == 1.0


def notes(known: Summary) -> str:
    return "; ".join(known.notes)


def test_a_bench_that_cannot_keep_up_says_so() -> None:
    late = run_of([answered(0.1, 0.2, 0.3)] * 4, late_s=0.03)
    assert not keeps_up(late, SLO)
    assert "could not keep up" in notes(summarise(late, SLO))
    assert "30 ms late" in notes(summarise(late, SLO))
    in_time = run_of([answered(0.1, 0.2, 0.3)], late_s=0.01)
    assert keeps_up(in_time, SLO)
    assert summarise(in_time, SLO).notes == []


def test_a_bench_that_fills_its_core_says_so() -> None:
    busy = run_of([answered(0.1, 0.2, 0.3)], duration_s=1.1)
    assert "91% of a core" in notes(summarise(busy, SLO))


def test_merged_events_and_missing_usage_are_told() -> None:
    merged = Answer((50.1, 50.3), 3, is_counted=True)
    assert "1.50 tokens per event" in notes(summarise(run_of([merged]), SLO))
    uncounted = Answer((50.1, 50.2, 50.3), 3, is_counted=False)
    assert "tells no usage" in notes(summarise(run_of([uncounted]), SLO))


def test_answers_of_other_lengths_are_told() -> None:
    assert "1 answers have other lengths" in notes(summarise(run_of([answered(0.1, 0.2)]), SLO))


def test_requests_that_miss_in_a_row_say_less_than_scattered_ones() -> None:
    """Both runs meet the target with nine requests in ten; one has its misses in one stretch."""

    def attainment(misses: set[int]) -> float:
        results = [
            answered(k + (0.9 if k in misses else 0.1 + k % 7 / 100), k + 1.0) for k in range(400)
        ]
        share = summarise(run_of(results, output_tokens=2), Slo(0.5, 2.0)).attainment
        assert share.value == pytest.approx(0.9)
        return share.high - share.low

    scattered = set(np.random.default_rng(0).choice(400, 40, replace=False).tolist())
    assert attainment(set(range(200, 240))) > 1.5 * attainment(scattered)
