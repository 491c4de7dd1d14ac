from pathlib import Path

import numpy as np
import pytest

from planner.bench.events import StageTimes
from planner.bench.live_run import Failure, LiveRun
from planner.bench.report import summarise
from planner.bench.run_file import COLUMNS, read_run, write_run
from planner.errors import WorkloadError
from planner.slo import Slo
from planner.workload.trace_file import read_trace
from tests.planner.live_runs import answered, run_of

SLO = Slo(0.5, 0.1)


@pytest.fixture
def run() -> LiveRun:
    stages = StageTimes(0.1, 0.2, 0.01, 0.02, 0.3)
    return run_of(
        [
            answered(0.4, 0.5, 0.7, stages=stages),
            Failure(1, "http_429", 'HTTP 429: full, "really"'),
            answered(2.6, 2.7),
        ]
    )


def test_a_trace_reads_back_as_the_run_it_was(run: LiveRun, tmp_path: Path) -> None:
    write_run(tmp_path / "run.csv", run)
    again = read_run(tmp_path / "run.csv")
    assert again.failures == run.failures
    assert again.is_answered.tolist() == [True, False, True]
    assert again.sent_s == pytest.approx(run.sent_s)
    assert summarise(again, SLO).attainment == summarise(run, SLO).attainment
    assert again.timeline.ttft_s == pytest.approx(run.timeline.ttft_s)
    assert again.timeline.tpot_s == pytest.approx(run.timeline.tpot_s)
    for name, values in run.timeline.stages_s().items():
        np.testing.assert_allclose(again.timeline.stages_s()[name], values, atol=2e-6)


def test_a_trace_is_a_workload_with_the_lengths_that_really_were(
    run: LiveRun, tmp_path: Path
) -> None:
    write_run(tmp_path / "run.csv", run)
    requests = read_trace(tmp_path / "run.csv")
    assert requests.arrival_s.tolist() == [0, 1, 2]
    assert requests.output_tokens.tolist() == [3, 3, 2]


def test_what_is_not_known_is_empty(run: LiveRun, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write_run(path, run)
    header, first, failed, unstaged = path.read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert first == (
        "0.000000,10,3,0.001000,0.400000,0.150000,0.400000,0.700000,0.200000,0.010000,0.020000,"
    )
    assert failed == '1.000000,10,3,1.001000,,,,,,,,"http_429: HTTP 429: full, ""really"""'
    assert unstaged == "2.000000,10,2,2.001000,0.600000,0.100000,2.600000,2.700000,,,,"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("first_token_s", "else"), "lacks the column first_token_s"),
        (("0.700000", "soon"), "line 2: last_token_s is no number of seconds: 'soon'"),
        (("0.400000,0.700000", ",0.700000"), "first_token_s is missing for a request without"),
        (("0.400000,0.700000", "0.400000,"), "last_token_s is missing for a request without"),
        (("0.000000,10", "0.000000,0"), "line 2: input_tokens"),
    ],
)
def test_what_is_no_trace_is_refused(
    change: tuple[str, str], message: str, run: LiveRun, tmp_path: Path
) -> None:
    path = tmp_path / "run.csv"
    write_run(path, run)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(WorkloadError, match=message):
        read_run(path)


def test_a_folder_that_is_not_there_is_named(run: LiveRun, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be written: No such file"):
        write_run(tmp_path / "none" / "run.csv", run)


def test_a_run_without_a_single_answer_can_be_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run.csv", run_of([Failure(0, "timeout", "late")]))
    again = read_run(tmp_path / "run.csv")
    assert len(again.timeline) == 0
    assert again.failures == (Failure(0, "timeout", "late"),)
