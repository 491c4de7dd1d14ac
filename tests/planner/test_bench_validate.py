"""Validation against services whose truth is known: simulated ones with hidden corrections."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from planner.bench.calibrate import Calibration
from planner.bench.comparison_tables import show_validation, told_verdict
from planner.bench.figures import draw_validation
from planner.bench.live_run import Failure, LiveRun
from planner.bench.options import ReplayOptions
from planner.bench.run_file import read_run
from planner.bench.validate import validate
from planner.bench.validation import ValidationReport
from planner.errors import BenchError, ServerFailed
from planner.simulate.overheads import read_overheads, with_overheads
from planner.simulator.service import Overheads
from planner.workload.requests import Requests
from tests.planner.live_runs import run_of
from tests.planner.validating import SERVICE, hidden, live_runs, plan, trace

TRUTH = Calibration(1.15, 1.2, 0.004, 0.003)


async def validated(
    folder: Path, truth: Calibration = TRUTH, **options: object
) -> tuple[ValidationReport, list[Requests]]:
    sent: list[Requests] = []
    asked = plan(folder, **options)  # type: ignore[arg-type]
    report = await validate(asked, live_runs(asked, hidden(truth, sent)))
    return report, sent


async def test_a_calibration_on_chats_predicts_other_chats_and_programs(tmp_path: Path) -> None:
    report, sent = await validated(tmp_path, tests=["sharegpt", "humaneval"])
    assert report.calibration.decode_scale == pytest.approx(TRUTH.decode_scale, rel=0.01)
    assert [(t.workload, t.rate) for t in report.trials] == [
        (name, rate) for name in ("sharegpt", "humaneval") for rate in (2.0, 2.5)
    ]
    assert [len(requests) for requests in sent] == [200, 400, 400, 400, 400]
    assert any(0.6 < trial.comparison.live.value < 0.97 for trial in report.trials)
    assert [told_verdict(trial) for trial in report.trials[:2]] == [
        f"at {rate}/s: agrees: attainment within 2.0 points, latencies within 10%"
        for rate in (2, 2.5)
    ]
    assert all(trial.verdict.agrees for trial in report.trials)
    assert report.notes == []


async def test_tests_are_of_other_requests_than_the_calibration(tmp_path: Path) -> None:
    _, (calibration, slow, fast) = await validated(tmp_path, tests=["sharegpt"])
    assert calibration.rate == pytest.approx(1.5)
    assert not np.array_equal(calibration.input_tokens, slow.input_tokens[:200])
    assert np.array_equal(slow.input_tokens, fast.input_tokens)


async def test_the_calibration_file_is_one_of_overheads(tmp_path: Path) -> None:
    report, _ = await validated(tmp_path, tests=["sharegpt"])
    assert report.calibration_file == str(tmp_path / "calibration.json")
    costs, factors = read_overheads(tmp_path / "calibration.json")
    found = report.calibration
    assert factors == Calibration(found.prefill_scale, found.decode_scale)
    assert costs == Overheads(
        arrival_s=found.arrival_s,
        handover_s=found.handover_s,
        prefill_step_s=found.prefill_step_s,
    )


async def test_what_was_told_already_is_in_the_calibration_file_too(tmp_path: Path) -> None:
    """It alone must make the service that was tested."""
    asked = plan(tmp_path, tests=["sharegpt"])
    assert asked.deployed is not None
    told = Calibration(1.1, 1.25)
    costs = with_overheads(Overheads(), [("decode_step_s", 0.0002)])
    service = told.apply(dataclasses.replace(SERVICE, overheads=costs))
    built = dataclasses.replace(asked.deployed.built, service=service, calibration=told)
    asked = dataclasses.replace(asked, deployed=dataclasses.replace(asked.deployed, built=built))
    report = await validate(asked, live_runs(asked, hidden(TRUTH, [])))
    costs, factors = read_overheads(tmp_path / "calibration.json")
    assert costs.decode_step_s == 0.0002
    assert report.calibration.decode_scale < 1.0
    assert factors.decode_scale == pytest.approx(1.25 * report.calibration.decode_scale)
    assert factors.decode_scale == pytest.approx(TRUTH.decode_scale, rel=0.02)


async def test_every_live_run_is_saved_under_its_name(tmp_path: Path) -> None:
    report, sent = await validated(tmp_path, tests=["sharegpt"], num_replays=2)
    runs = [report.calibration_run, *(run for trial in report.trials for run in trial.runs)]
    assert [Path(run.trace).name.split("-", 2)[2] for run in runs] == [
        "calibration-rate-1.5.csv",
        "sharegpt-rate-2.csv",
        "sharegpt-replay-1-rate-2.csv",
        "sharegpt-rate-2.5.csv",
        "sharegpt-replay-1-rate-2.5.csv",
    ]
    assert [len(read_run(Path(run.trace))) for run in runs] == [200, 400, 400, 400, 400]
    assert np.array_equal(sent[1].arrival_s, sent[2].arrival_s)


async def test_replays_have_other_prompts_so_that_no_prefix_cache_helps(tmp_path: Path) -> None:
    seeds: list[int] = []
    asked = plan(tmp_path, tests=["sharegpt"], num_replays=2)
    truth = hidden(TRUTH, [])

    async def send(requests: Requests, options: ReplayOptions) -> LiveRun:
        seeds.append(options.seed)
        return await truth(requests, options)

    await validate(asked, live_runs(asked, send))
    assert len(set(seeds)) == 5


async def test_the_knee_is_found_on_both_sides(tmp_path: Path) -> None:
    report, sent = await validated(tmp_path, tests=["sharegpt"], wants_knee=True)
    (knee,) = report.knees
    assert knee.live.rate is not None
    assert knee.error == pytest.approx(0.0, abs=0.05)
    assert len(sent) > 3
    assert knee.is_settled


async def test_a_search_with_too_few_runs_says_so(tmp_path: Path) -> None:
    asked = dataclasses.replace(plan(tmp_path, tests=["longbench"], wants_knee=True), max_runs=1)
    report = await validate(asked, live_runs(asked, hidden(TRUTH, [])))
    assert not report.knees[0].is_settled
    page = io.StringIO()
    show_validation(report, Console(file=page))
    assert "the live search is not at its end: more --max-runs" in page.getvalue()


async def test_the_report_and_the_figure_tell_both_sides(tmp_path: Path) -> None:
    report, _ = await validated(
        tmp_path, tests=["sharegpt", "humaneval"], num_replays=2, wants_knee=True
    )
    page = io.StringIO()
    show_validation(report, Console(width=80, file=page))
    told = page.getvalue()
    for part in (
        "calibrated on 200 requests: prefill steps take 1.15",
        "tested on sharegpt; latencies in ms",
        "tested on humaneval; latencies in ms",
        "4 of 4 test traces agree",
        "simulated: goodput: ",
        "two replays differ by 0.0",
    ):
        assert part in told
    assert max(map(len, [line for line in told.splitlines() if "P50" in line])) <= 80
    figure = tmp_path / "both.svg"
    draw_validation(figure, report)
    for label in ("sharegpt, measured", "humaneval, simulated"):
        assert label in figure.read_text()


async def test_a_wrong_profile_does_not_agree_and_says_in_what(tmp_path: Path) -> None:
    """A service with a delay for each token's way: no factor or hand-over stands for it."""
    sent: list[Requests] = []
    asked = plan(tmp_path, tests=["sharegpt"])
    truth = hidden(TRUTH, sent)

    async def slow_way(requests: Requests, options: ReplayOptions) -> LiveRun:
        live = await truth(requests, options)
        if len(sent) == 1:
            return live
        later = live.timeline.first_token_s + 0.2
        return dataclasses.replace(
            live, timeline=dataclasses.replace(live.timeline, first_token_s=later)
        )

    report = await validate(asked, live_runs(asked, slow_way))
    verdict = told_verdict(report.trials[0])
    assert verdict.startswith("at 2/s: does not agree: attainment ")
    assert "TTFT P50 -" in verdict


async def test_a_service_that_answers_nothing_ends_the_validation(tmp_path: Path) -> None:
    asked = plan(tmp_path, tests=["sharegpt"])

    async def send(requests: Requests, options: ReplayOptions) -> LiveRun:
        return run_of([Failure(0, "http_429", "HTTP 429: full")])

    with pytest.raises(ServerFailed, match=r"none of the 200 .* http_429, such as: HTTP 429: full"):
        await validate(asked, live_runs(asked, send))
    assert ServerFailed.exit_code == 1


async def test_answers_that_come_at_once_calibrate_nothing(tmp_path: Path) -> None:
    asked = plan(tmp_path, tests=["sharegpt"])
    truth = hidden(TRUTH, [])

    async def at_once(requests: Requests, options: ReplayOptions) -> LiveRun:
        live = await truth(requests, options)
        ended = dataclasses.replace(live.timeline, last_token_s=live.timeline.decode_start_s)
        return dataclasses.replace(live, timeline=ended)

    with pytest.raises(BenchError, match="its steps took hardly any time"):
        await validate(asked, live_runs(asked, at_once))
    assert not (tmp_path / "calibration.json").exists()


async def test_a_trace_that_is_always_the_same_is_pointed_out(tmp_path: Path) -> None:
    file = tmp_path / "my.csv"
    rows = "".join(f"{0.6 * k},{20 + k},{3 + k % 7}\n" for k in range(400))
    file.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    asked = plan(tmp_path, tests=[str(file)])
    assert asked.validation is not None
    same = dataclasses.replace(asked.validation, calibration=trace(str(file), 200))
    asked = dataclasses.replace(asked, validation=same)
    report = await validate(asked, live_runs(asked, hidden(TRUTH, [])))
    assert "was tested on the requests of the calibration" in report.notes[0]
