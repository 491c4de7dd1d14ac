"""`distserve check-gpu` as people run it: lines, report, exit codes, stages that hang or crash."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from gpu_workers.arguments import EXIT_USAGE
from gpu_workers.check_gpu import command
from gpu_workers.check_gpu.backend import CpuBackend
from gpu_workers.check_gpu.outcome import CheckFailed, Note, Outcome, Report, Skipped, Verdict
from gpu_workers.check_gpu.stage_process import StageProcess
from gpu_workers.check_gpu.stages import BY_NAME, STAGES, Stage, run_here


@pytest.fixture(scope="module")
def process() -> Iterator[StageProcess]:
    """The stages' process, on the CPU."""
    python = [sys.executable, "-P", "-m", "gpu_workers", "check-gpu"]
    with StageProcess([*python, "--device", "cpu", "--serve-stages"]) as process:
        yield process


def run(process: StageProcess, stage: str) -> Outcome:
    return process.run(stage, BY_NAME[stage].limit_on("cpu"))


def test_it_runs_its_stages_and_leaves_reports_for_people_and_programs(tmp_path: Path) -> None:
    as_json, for_people = tmp_path / "report.json", tmp_path / "report.md"
    asked = ["check-gpu", "--device", "cpu", "--stages", "host,probe,modules"]
    files = ["--json", str(as_json), "--report", str(for_people)]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "daemon", *asked, *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    expected = [["PASS", "probe"], ["SKIP", "modules"], ["PASS", "host"]]
    assert [line.split()[:2] for line in lines[:3]] == expected
    assert lines[3].startswith("cpu: 2 PASS, 1 SKIP in ")
    told: dict[str, Any] = orjson.loads(as_json.read_bytes())
    assert [stage["verdict"] for stage in told["stages"]] == ["PASS", "SKIP", "PASS"]
    assert told["device"] == "cpu"
    assert told["stages"][2]["figures"]["batch 8"]["prepare_us"] > 0
    text = for_people.read_text()
    assert text.startswith(f"# Check of cpu, {told['started']}\n")
    assert "| modules | SKIP |" in text


@pytest.mark.slow
def test_the_whole_service_stands_the_death_of_a_worker(process: StageProcess) -> None:
    ran = run(process, "service")
    assert (ran.verdict, ran.figures["requests"]) == (Verdict.PASS, 16), ran.detail
    assert ran.figures["blocks_left"] == 0
    assert ran.figures["ttft_ms"]["alone"] > ran.figures["tpot_ms"]["alone"] > 0


@pytest.mark.slow
def test_two_workers_that_prefill_together_answer_as_one_engine(process: StageProcess) -> None:
    ran = run(process, "parallel")
    assert ran.verdict is Verdict.PASS, ran.detail


@pytest.mark.slow
def test_the_model_draws_what_transformers_holds_for_likely(process: StageProcess) -> None:
    ran = run(process, "model")
    assert ran.verdict is Verdict.PASS, ran.detail


def test_steps_are_measured_beside_their_floor(process: StageProcess) -> None:
    ran = run(process, "steps")
    assert ran.verdict is Verdict.PASS, ran.detail
    batches = {"1", "4"}
    assert ran.figures["decode_floor_ms"].keys() == batches
    assert ran.figures["decode_eager_ms"].keys() == batches
    assert ran.figures["prefill 64"]["tokens_per_s"] > 0


def test_pulls_are_measured_beside_a_copy(process: StageProcess) -> None:
    ran = run(process, "bandwidth")
    assert ran.verdict is Verdict.PASS, ran.detail
    assert set(ran.figures) == {"256 KiB", "2048 KiB", "12800 KiB"}


def failing(backend: Any, note: Note) -> str:
    note("seen", 1)
    raise CheckFailed("blocks differ")


def crashing(backend: Any, note: Note) -> str:
    raise ZeroDivisionError("by zero")


def skipping(backend: Any, note: Note) -> str:
    raise Skipped("transformers is not installed")


@pytest.mark.parametrize(
    ("act", "verdict", "detail"),
    [
        (failing, Verdict.FAIL, "blocks differ"),
        (crashing, Verdict.FAIL, "ZeroDivisionError: by zero"),
        (skipping, Verdict.SKIP, "transformers is not installed"),
        (lambda backend, note: "fine", Verdict.PASS, "fine"),
    ],
)
def test_whatever_a_stage_does_is_its_outcome(act: Any, verdict: Verdict, detail: str) -> None:
    outcome = run_here(Stage("one", 1, act), CpuBackend, lambda name, value: None)
    assert (outcome.verdict, outcome.detail) == (verdict, detail)
    assert ("ZeroDivisionError" in outcome.log) == (act is crashing)


def test_figures_of_a_stage_that_failed_are_kept() -> None:
    noted: list[tuple[str, Any]] = []
    outcome = run_here(Stage("one", 1, failing), CpuBackend, lambda *figure: noted.append(figure))
    assert (dict(outcome.figures), noted) == ({"seen": 1}, [("seen", 1)])


SERVES = """
import os, subprocess, sys, time
from gpu_workers.check_gpu import stage_process
from gpu_workers.check_gpu.outcome import Outcome, Verdict
from gpu_workers.check_gpu.stage_process import Figure

def run(name, say):
    say(Figure("process", os.getpid()))
    print("what a library prints is no word of ours")
    if name == "hangs":
        subprocess.run(["sleep", "1000"])
    if name == "dies":
        sys.stderr.write("last words\\n")
        os.abort()
    verdict = Verdict.FAIL if name == "fails" else Verdict.PASS
    return Outcome(name, verdict, 0.1, "as told", {"process": os.getpid()})

stage_process.serve(run)
"""


@pytest.fixture
def played() -> Iterator[StageProcess]:
    with StageProcess([sys.executable, "-c", SERVES]) as process:
        yield process


def test_stages_that_pass_share_a_process_and_one_that_failed_leaves_a_fresh_one(
    played: StageProcess,
) -> None:
    names = ("passes", "passes", "fails", "passes")
    first, second, third, fourth = (played.run(name, 60).figures["process"] for name in names)
    assert first == second == third != fourth


def test_a_stage_that_hangs_is_ended_with_all_that_it_started_and_keeps_its_figures(
    played: StageProcess,
) -> None:
    before = played.run("passes", 60).figures["process"]
    outcome = played.run("hangs", 0.5)
    assert (outcome.verdict, outcome.detail) == (Verdict.FAIL, "not done after 0.5 s")
    assert outcome.figures == {"process": before}
    assert played.run("passes", 60).figures["process"] != before


def test_a_stage_that_dies_has_failed_and_its_last_words_are_kept(played: StageProcess) -> None:
    outcome = played.run("dies", 60)
    assert outcome.verdict is Verdict.FAIL
    assert outcome.detail == "its process ended with -6 and said nothing"
    assert "last words" in outcome.log


def test_a_process_that_never_comes_up_is_a_failure_of_each_stage() -> None:
    with StageProcess([sys.executable, "-c", "raise SystemExit('no such device')"]) as process:
        outcomes = [process.run("probe", 60), process.run("pulls", 60)]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.FAIL] * 2
    assert "no such device" in outcomes[1].log


def always(ends: Sequence[Verdict]) -> Callable[[str, float], Outcome]:
    verdicts = iter(ends)
    return lambda name, limit_s: Outcome(name, next(verdicts), 0.1, f"within {limit_s:g} s")


def test_the_check_goes_on_after_a_failure() -> None:
    said: list[Report] = []
    chosen = [(stage, float("inf")) for stage in STAGES[:2]]
    report = command.check("cpu", chosen, always([Verdict.FAIL, Verdict.PASS]), said.append)
    assert [len(report.stages) for report in said] == [1, 2]
    assert [outcome.verdict for outcome in report.stages] == [Verdict.FAIL, Verdict.PASS]
    assert report.exit_code == 1


def test_a_check_whose_time_is_over_begins_nothing_more_and_cuts_the_last_one_short() -> None:
    times_s = iter([0.0, 0.0, 40.0, 40.0, 50.0, 50.0])
    chosen = [(BY_NAME[name], 50.0) for name in ("attention", "pulls", "service")]
    ends = always([Verdict.PASS, Verdict.PASS])
    report = command.check("cuda:0", chosen, ends, lambda report: None, lambda: next(times_s, 50.0))
    assert [outcome.verdict for outcome in report.stages] == [
        Verdict.PASS,
        Verdict.PASS,
        Verdict.SKIP,
    ]
    assert [outcome.detail for outcome in report.stages] == [
        "within 50 s",
        "within 10 s",
        "the time of the check was over",
    ]


def test_a_skipped_stage_is_no_failure_but_nothing_else_is_no_proof() -> None:
    skipped = Outcome("one", Verdict.SKIP, 0.1, "")
    assert Report("cpu", "", 1.0, (skipped, Outcome("two", Verdict.PASS, 0.1, ""))).exit_code == 0
    assert Report("cpu", "", 1.0, (skipped, skipped)).exit_code == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_the_gpu_that_was_asked_for_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == command.EXIT_NO_DEVICE
    assert "CUDA sees no GPU here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_cannot_be_used_is_not_replaced_by_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which would pass."""
    (tmp_path / "nvidiactl").touch()
    assert command.main([], driver=tmp_path / "nvidiactl") == command.EXIT_NO_DEVICE
    assert "CUDA sees no GPU here, and cuda:0 is to be checked: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--stages", "nonsense", "there is no stage 'nonsense'"),
        ("--device", "gpu0", "'gpu0' is neither cpu nor cuda:N"),
        ("--device", "cuda:x", "'cuda:x' is neither cpu nor cuda:N"),
        ("--within", "-1", "'-1' is not a positive number"),
        ("--within", "soon", "'soon' is not a positive number"),
    ],
)
def test_a_wrong_option_is_one_line(
    option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([f"{option}={value}"])
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err == (
        f"distserve check-gpu: argument {option}: {reason} "
        "(`distserve check-gpu --help` lists the options)\n"
    )


def test_a_report_that_cannot_be_written_is_told_before_anything_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command.main(["--device", "cpu", "--json", str(tmp_path / "no" / "report.json")])
    assert code == command.EXIT_CANNOT_WRITE
    assert "cannot be written" in capsys.readouterr().err
