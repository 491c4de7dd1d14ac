"""The report for people: what a played GPU's stages found, what failed, what was not reached."""

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
import pytest

from gpu_workers.check_gpu.bandwidth import check_bandwidth
from gpu_workers.check_gpu.command import as_json
from gpu_workers.check_gpu.outcome import Outcome, Report, Verdict
from gpu_workers.check_gpu.report import told
from gpu_workers.check_gpu.steps import SMALL, measure_steps
from tests.gpu_workers.check_gpu.played_gpu import played_gpu


def passed(stage: str, figures: Mapping[str, Any]) -> Outcome:
    return Outcome(stage, Verdict.PASS, 1.5, "fine", figures)


@pytest.fixture(scope="module")
def report() -> Report:
    """Of a played GPU, as it comes through JSON from the stages' process."""
    steps: dict[str, Any] = {}
    measure_steps(played_gpu(), steps.__setitem__, SMALL)
    bandwidth: dict[str, Any] = {}
    check_bandwidth(played_gpu(), bandwidth.__setitem__, blocks_kib=(256,), pool_bytes=1 << 20)
    packages = {"torch": "2.13", "transformers": None}
    probe = {"gpus": ["a played GPU"], "packages": packages, "nvcc": None}
    failed = Outcome("pulls", Verdict.FAIL, 2.0, "blocks | differ", log="first\nlast words")
    late = Outcome("death", Verdict.SKIP, 0.0, "the time of the check was over")
    stages = (
        passed("probe", probe),
        passed("steps", steps),
        passed("bandwidth", bandwidth),
        passed("host", {"batch 1": {"plan_us": 41.5}}),
        failed,
        late,
    )
    whole = Report("cuda:0", "2026-01-02T03:04:05+00:00", 61.0, stages)
    return msgspec.convert(orjson.loads(as_json(whole)), Report)


def lines(report: Report) -> list[str]:
    return told(report).splitlines()


def cells(report: Report, first: str) -> list[str]:
    """Of the first table's line that begins like that."""
    line = next(line for line in lines(report) if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_it_begins_with_the_device_the_date_and_what_is_there(report: Report) -> None:
    assert lines(report)[0] == "# Check of cuda:0, 2026-01-02T03:04:05+00:00"
    assert cells(report, "gpus") == ["gpus", "a played GPU"]
    assert cells(report, "packages") == ["packages", "torch 2.13, transformers none"]
    assert not any(line.startswith("| nvcc |") for line in lines(report))
    assert "4 stages passed, 1 failed, 1 were skipped, in 61 s." in lines(report)


def test_stages_stand_in_their_order_and_nothing_they_said_breaks_the_table(
    report: Report,
) -> None:
    start = lines(report).index("| stage |  | seconds | what it found |")
    rows = lines(report)[start + 2 : start + 8]
    assert [row.split(" | ")[1] for row in rows] == ["PASS"] * 4 + ["FAIL", "SKIP"]
    assert rows[4] == "| pulls | FAIL | 2.0 | blocks \\| differ |"


def test_decode_steps_stand_beside_their_floor_in_every_way_of_running_them(
    report: Report,
) -> None:
    titles = cells(report, "batch")
    assert titles == ["batch", "eager", "captured", "as served", "floor", "times the floor"]
    row = dict(zip(titles, map(float, cells(report, "4")), strict=True))
    figures = report.figures("steps")
    assert row["as served"] == pytest.approx(figures["decode_served_ms"]["4"], rel=1e-3)
    ratio = figures["decode_served_ms"]["4"] / figures["decode_floor_ms"]["4"]
    assert row["times the floor"] == pytest.approx(ratio, abs=0.006)


def test_prompts_and_pulls_have_tables_of_their_own(report: Report) -> None:
    prompt = report.figures("steps")["prefill 64"]
    assert cells(report, "64")[1] == f"{prompt['tokens_per_s']:,.0f}"
    pulls = dict(zip(cells(report, "blocks of"), cells(report, "256 KiB"), strict=True))
    assert float(pulls["in one batch"]) > 0
    assert float(pulls["beside work"]) > 0
    assert len(cells(report, "runs of 16 KiB")) == 3


def test_other_figures_are_listed_and_a_failed_stages_last_words_are_kept(
    report: Report,
) -> None:
    assert "| host | batch 1 | plan_us 41.5 |" in lines(report)
    last = lines(report).index("## What pulls said last")
    assert lines(report)[last + 2 : last + 4] == ["    first", "    last words"]


def test_a_report_of_nothing_is_written_too() -> None:
    assert told(Report("cuda:0", "", 0.0, ())).startswith("# Check of cuda:0, not begun\n")


def test_a_report_of_a_stage_that_was_cut_short_has_what_it_noted() -> None:
    steps = {"copy_gb_s": 4300.0, "decode_floor_ms": {"1": 3.7}, "decode_eager_ms": {"1": 9.0}}
    cut = Outcome("steps", Verdict.FAIL, 100.0, "not done after 100 s", steps)
    report = Report("cuda:0", "2026-01-02", 100.0, (cut,))
    assert cells(report, "batch") == ["batch", "eager", "floor", "times the floor"]
    assert cells(report, "1") == ["1", "9", "3.7", "2.43"]
