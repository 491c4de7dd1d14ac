"""The command `distserve check-gpu`: options, a line for each stage, a report as JSON and for
people, written anew after every stage so that a check that is cut short leaves what it has."""

import argparse
import datetime
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import orjson
import torch

from gpu_workers.arguments import Parser, amount
from gpu_workers.check_gpu import stage_process, stages
from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import Outcome, Report, Verdict
from gpu_workers.check_gpu.report import told
from gpu_workers.check_gpu.stage_process import Figure, Say, StageProcess
from gpu_workers.check_gpu.stages import BY_NAME, STAGES, Stage
from gpu_workers.worker_engine import NVIDIA_DRIVER
from ipc.cuda_runtime import CudaUnavailable, load_runtime

EXIT_NO_DEVICE = 69
EXIT_CANNOT_WRITE = 73

Files = dict[Callable[[Report], str], Path | None]
"""Where each form of a report goes."""
Runs = Callable[[str, float], Outcome]
"""Runs the stage of that name within so many seconds, in a process of its own."""


def main(argv: Sequence[str], driver: Path = NVIDIA_DRIVER) -> int:
    """Exit code: 0 when stages passed and none failed, else 1; 64 for a wrong option, 69 without
    the device, 73 when a report cannot be written.

    Args:
        driver: is there if the driver of GPUs is.
    """
    arguments = _parser().parse_args(argv)
    device = _device(arguments.device, driver)
    if arguments.serve_stages:
        serve_stages(lambda: stages.backend_of(device))
        return 0
    if reason := _refusal(device):
        sys.stderr.write(f"distserve check-gpu: {reason}\n")
        return EXIT_NO_DEVICE
    files: Files = {told: arguments.report, as_json: arguments.json}
    try:
        _write(Report(device, "", 0.0, ()), files)  # better now than after five minutes
        with StageProcess(_stage_command(device)) as process:
            chosen = list(_chosen(arguments))
            report = check(device, chosen, process.run, lambda r: _show(r, files))
    except OSError as error:
        path = error.filename
        sys.stderr.write(f"distserve check-gpu: {path} cannot be written: {error.strerror}\n")
        return EXIT_CANNOT_WRITE
    counts = {v: sum(o.verdict is v for o in report.stages) for v in Verdict}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    sys.stdout.write(f"{report.device}: {said} in {report.seconds:.0f} s\n")
    return report.exit_code


def check(
    device: str,
    chosen: Sequence[tuple[Stage, float]],
    run: Runs,
    show: Callable[[Report], None],
    now: Callable[[], float] = time.monotonic,
) -> Report:
    """Run stages one after the other, whatever becomes of those before.

    Args:
        chosen: stages, and when each must have ended at the latest, in seconds from the start.
        show: called with all there is after each stage.
    """
    began_s, started = now(), datetime.datetime.now(datetime.UTC)
    report = Report(device, started.isoformat(timespec="seconds"), 0.0, ())
    for stage, end_s in chosen:
        left_s = end_s - (now() - began_s)
        if left_s > 0:
            outcome = run(stage.name, min(left_s, stage.limit_on(device)))
        else:
            outcome = Outcome(stage.name, Verdict.SKIP, 0.0, "the time of the check was over")
        report = msgspec.structs.replace(
            report, seconds=now() - began_s, stages=(*report.stages, outcome)
        )
        show(report)
    return report


def serve_stages(open_backend: Callable[[], Backend]) -> None:
    """What the process of the stages does; see `stage_process`."""
    torch.set_num_threads(1)  # what is compared on the host is small
    opened: list[Backend] = []

    def backend() -> Backend:
        """Opened within the first stage, whose failure it then is if it cannot be."""
        if not opened:
            opened.append(open_backend())
        return opened[0]

    def run(name: str, say: Say) -> Outcome:
        return stages.run_here(BY_NAME[name], backend, lambda n, value: say(Figure(n, value)))

    stage_process.serve(run)


def as_json(report: Report) -> str:
    plain = msgspec.to_builtins(report, str_keys=True)
    return orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="distserve check-gpu",
        description="Prove a device: attention, captured steps, pulls between processes, a model "
        "against transformers, the whole service; and measure it: steps and pulls beside their "
        "floors. With --device cpu the same stages prove themselves on the CPU.",
        epilog="stages: " + ", ".join(BY_NAME) + ". gpu_workers/check_gpu/README.md tells how to "
        "run it on a bare machine.",
    )
    parser.add_argument(
        "--device", type=_named, help="cpu or cuda:N (default: cuda:0 where there is one)"
    )
    parser.add_argument("--stages", type=_names, metavar="NAME,...", help="only these")
    parser.add_argument(
        "--within", type=amount, metavar="S", help="begin nothing after so many seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="the report for people")
    parser.add_argument("--serve-stages", action="store_true", help=argparse.SUPPRESS)
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"there is no stage {unknown[0]!r}")
    return names


def _named(text: str) -> str:
    if re.fullmatch(r"cpu|cuda(:[0-9]+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda:N")
    return text


def _device(asked: str | None, driver: Path) -> str:
    if asked is None:
        # A GPU that cannot be used is to be told of: a CPU in its place would pass.
        return "cuda:0" if torch.cuda.is_available() or driver.exists() else "cpu"
    return "cuda:0" if asked == "cuda" else asked


def _refusal(device: str) -> str | None:
    """Why there is no such device, if there is none. The device itself is not touched: it is the
    stages' process that has it."""
    if device == "cpu":
        return None
    number = device.removeprefix("cuda:")
    if not torch.cuda.is_available():
        return f"CUDA sees no GPU here, and {device} is to be checked{_cause()}"
    if int(number) >= (count := torch.cuda.device_count()):
        return f"there is no GPU {number}: CUDA sees {count} here"
    return None


def _cause() -> str:
    """Why CUDA cannot be used, where its library says so."""
    try:
        load_runtime()
    except CudaUnavailable as error:
        return f": {error}"
    return ""


def _chosen(arguments: argparse.Namespace) -> Iterator[tuple[Stage, float]]:
    end_s = float("inf") if arguments.within is None else arguments.within
    for stage in STAGES:
        if stage.name in (arguments.stages or BY_NAME):
            yield stage, end_s


def _stage_command(device: str) -> list[str]:
    python = [sys.executable, "-P", "-m", "gpu_workers", "check-gpu"]
    return [*python, "--device", device, "--serve-stages"]


def _show(report: Report, files: Files) -> None:
    """The last stage's line on the terminal, and everything in the files."""
    last = report.stages[-1]
    sys.stdout.write(f"{last.verdict}  {last.stage:<10} {last.seconds:7.1f} s  {last.detail}\n")
    if last.log:
        sys.stdout.write("".join(f"      | {line}\n" for line in last.log.splitlines()[-12:]))
    sys.stdout.flush()
    _write(report, files)


def _write(report: Report, files: Files) -> None:
    for form, path in files.items():
        if path is not None:
            path.write_text(form(report), encoding="utf-8")
