"""The command `distserve check-gpu`: options, a line for each stage, a report as JSON."""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import orjson
import torch

from gpu_workers.check_gpu import stages
from gpu_workers.check_gpu.outcome import Outcome, Report, Verdict
from gpu_workers.check_gpu.stages import BY_NAME, STAGES, Stage

EXIT_NO_DEVICE = 69
EXIT_CANNOT_WRITE = 73


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 when no stage failed, 1 when one did, 69 without the device."""
    arguments = _parser().parse_args(argv)
    device = _device(arguments.device)
    if arguments.only_here is not None:
        outcome = stages.run_here(BY_NAME[arguments.only_here], lambda: stages.backend_of(device))
        sys.stdout.buffer.write(_json(outcome) + b"\n")
        return 0
    if device != "cpu" and not torch.cuda.is_available():
        sys.stderr.write(
            f"distserve check-gpu: CUDA sees no GPU here, and {device} was asked for\n"
        )
        return EXIT_NO_DEVICE
    chosen = [stage for stage in STAGES if stage.name in (arguments.stages or BY_NAME)]
    report = check(device, chosen, _say)
    return _finish(report, arguments.json)


def check(device: str, chosen: Sequence[Stage], say: Callable[[Outcome], None]) -> Report:
    """Run stages one after the other, whatever becomes of those before."""
    began_s, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    outcomes = []
    for stage in chosen:
        outcome = stages.run_apart(stages.stage_command(stage, device), stage)
        say(outcome)
        outcomes.append(outcome)
    seconds = time.monotonic() - began_s
    return Report(device, started.isoformat(timespec="seconds"), seconds, tuple(outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distserve check-gpu",
        description="Prove a device: attention, pulls between processes, bandwidth, captured "
        "steps, a model against transformers, the whole service; and measure its steps. With "
        "--device cpu the same stages prove themselves on the CPU.",
        epilog="stages: " + ", ".join(BY_NAME),
    )
    parser.add_argument(
        "--device", default=None, help="cpu or cuda:N (default: cuda:0 where there is one)"
    )
    parser.add_argument("--stages", type=_names, metavar="NAME,...", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes")
    parser.add_argument("--only-here", choices=list(BY_NAME), help=argparse.SUPPRESS)
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"there is no stage {unknown[0]!r}")
    return names


def _device(asked: str | None) -> str:
    if asked is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if asked == "cuda" else asked


def _say(outcome: Outcome) -> None:
    line = f"{outcome.verdict}  {outcome.stage:<10} {outcome.seconds:7.1f} s  {outcome.detail}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def _finish(report: Report, path: Path | None) -> int:
    counts = {v: sum(o.verdict is v for o in report.stages) for v in Verdict}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    sys.stdout.write(f"{report.device}: {told} in {report.seconds:.0f} s\n")
    if path is None:
        return report.exit_code
    try:
        path.write_bytes(orjson.dumps(msgspec.to_builtins(report), option=orjson.OPT_INDENT_2))
    except OSError as error:
        sys.stderr.write(f"distserve check-gpu: {path} cannot be written: {error.strerror}\n")
        return EXIT_CANNOT_WRITE
    return report.exit_code


def _json(outcome: Outcome) -> bytes:
    return orjson.dumps(msgspec.to_builtins(outcome, str_keys=True))
