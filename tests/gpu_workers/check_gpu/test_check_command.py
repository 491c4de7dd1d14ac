"""`distserve check-gpu` as people run it: lines, report, exit codes, stages that hang or crash."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from gpu_workers.check_gpu import command, stages
from gpu_workers.check_gpu.backend import Backend, CpuBackend
from gpu_workers.check_gpu.outcome import CheckFailed, Found, Outcome, Report, Skipped, Verdict
from gpu_workers.check_gpu.stages import BY_NAME, STAGES, Stage, run_apart, run_here


def test_it_runs_its_stages_and_leaves_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    asked = ["check-gpu", "--device", "cpu", "--stages", "attention,probe", "--json", str(report)]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "daemon", *asked], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["PASS", "probe"], ["PASS", "attention"]]
    assert lines[2].startswith("cpu: 2 PASS in ")
    told: dict[str, Any] = orjson.loads(report.read_bytes())
    assert [stage["verdict"] for stage in told["stages"]] == ["PASS", "PASS"]
    assert told["device"] == "cpu"
    assert told["stages"][1]["figures"]["errors"]["64x8/8"] < 0.02


@pytest.mark.slow
def test_the_whole_service_stands_the_death_of_a_worker() -> None:
    ran = run_apart(stages.stage_command(BY_NAME["service"], "cpu"), BY_NAME["service"])
    assert (ran.verdict, ran.figures["requests"]) == (Verdict.PASS, 16), ran.detail


@pytest.mark.slow
def test_the_model_draws_what_transformers_holds_for_likely() -> None:
    ran = run_apart(stages.stage_command(BY_NAME["model"], "cpu"), BY_NAME["model"])
    assert ran.verdict is Verdict.PASS, ran.detail


def test_steps_are_measured_beside_their_floor() -> None:
    ran = run_apart(stages.stage_command(BY_NAME["steps"], "cpu"), BY_NAME["steps"])
    assert ran.verdict is Verdict.PASS, ran.detail
    assert ran.figures["floor_ms"].keys() == ran.figures["eager"].keys() == {"1", "4"}
    assert ran.figures["prefill_tokens_per_s"]["64"] > 0


def test_pulls_are_measured_beside_a_copy() -> None:
    ran = run_apart(stages.stage_command(BY_NAME["bandwidth"], "cpu"), BY_NAME["bandwidth"])
    assert ran.verdict is Verdict.PASS, ran.detail
    assert set(ran.figures) == {"256 KiB", "2048 KiB", "12800 KiB"}


def failing(backend: Backend) -> Found:
    raise CheckFailed("blocks differ")


def crashing(backend: Backend) -> Found:
    raise ZeroDivisionError("by zero")


def skipping(backend: Backend) -> Found:
    raise Skipped("transformers is not installed")


@pytest.mark.parametrize(
    ("run", "verdict", "detail"),
    [
        (failing, Verdict.FAIL, "blocks differ"),
        (crashing, Verdict.FAIL, "ZeroDivisionError: by zero"),
        (skipping, Verdict.SKIP, "transformers is not installed"),
        (lambda backend: Found("fine"), Verdict.PASS, "fine"),
    ],
)
def test_whatever_a_stage_does_is_its_outcome(run: Any, verdict: Verdict, detail: str) -> None:
    outcome = run_here(Stage("one", 1, run), CpuBackend)
    assert (outcome.verdict, outcome.detail) == (verdict, detail)


def test_a_stage_that_hangs_is_ended_with_all_that_it_started() -> None:
    """Its children hold its output open: were they left, this would not return."""
    code = "import subprocess; subprocess.run(['sleep', '1000'])"
    outcome = run_apart([sys.executable, "-c", code], Stage("one", 0.5, failing))
    assert (outcome.verdict, outcome.detail) == (Verdict.FAIL, "not done after 0.5 s")


@pytest.mark.parametrize("code", ["import os; os.abort()", "print('hello')"])
def test_a_stage_that_says_nothing_has_failed(code: str) -> None:
    outcome = run_apart([sys.executable, "-c", code], Stage("one", 60, failing))
    assert outcome.verdict is Verdict.FAIL
    assert "said nothing" in outcome.detail


def test_the_check_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([Verdict.FAIL, Verdict.PASS])
    monkeypatch.setattr(
        stages, "run_apart", lambda _, stage: Outcome(stage.name, next(ends), 0.1, "")
    )
    said: list[Outcome] = []
    report = command.check("cpu", STAGES[:2], said.append)
    assert [outcome.verdict for outcome in said] == [Verdict.FAIL, Verdict.PASS]
    assert report.exit_code == 1


def test_a_skipped_stage_is_no_failure() -> None:
    assert Report("cpu", "", 1.0, (Outcome("one", Verdict.SKIP, 0.1, ""),)).exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_the_gpu_that_was_asked_for_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == command.EXIT_NO_DEVICE
    assert "CUDA sees no GPU here" in capsys.readouterr().err


def test_a_stage_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--stages", "nonsense"])
    assert "there is no stage 'nonsense'" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check", lambda *_: Report("cpu", "", 1.0, ()))
    code = command.main(["--device", "cpu", "--json", str(tmp_path / "no" / "report.json")])
    assert code == command.EXIT_CANNOT_WRITE
    assert "cannot be written" in capsys.readouterr().err
