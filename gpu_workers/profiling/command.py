"""The command `distserve profile`: options, progress, the table as JSON and on the terminal."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gpu_workers.collectives import CollectivesFailed
from gpu_workers.errors import ModelError
from gpu_workers.models.config import read_config
from gpu_workers.plan_bus import GroupBroken
from gpu_workers.profiling.measure import Effort, Report, measure
from gpu_workers.profiling.ranks import Subject, has_cores_for
from gpu_workers.profiling.report import show
from gpu_workers.profiling.whole_instance import instance
from ipc.kv_shm import PoolUnavailable
from ipc.messages import LoadFormat
from ipc.profile_table import ProfileTable
from ipc.vocabulary import DType, Parallelism

QUICK_CONTEXT, QUICK_BATCH, QUICK_S = 512, 8, 9.0
DEFAULT_S = 75.0
KNEE_SHARE = 0.1  # of the seconds, spent on the prompts near L_m
STAGES_SHARE = 0.15  # and on how steps follow each other through the stages, if there are several


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        if arguments.out is not None:
            _check_writable(arguments.out)
        table = _profile(arguments, console)
    except (ModelError, PoolUnavailable, CollectivesFailed, GroupBroken) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    if arguments.out is not None:
        arguments.out.write_bytes(orjson.dumps(msgspec.to_builtins(table)))
    show(table, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distserve profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Measure how long an instance's steps take on this machine: prefill by prompt length\n"
            "and by number of prompts, decode by batch and context, chunks of prompts beside\n"
            "decodes, and pulls of keys and values from another instance's pools. The table is\n"
            "what distserve simulate and plan predict with. Finds L_m too, the shortest prompt\n"
            "that saturates the device: prompts below it are worth packing together.\n\n"
            "With --tp and --pp it is an instance of that shape, a process for each worker: steps\n"
            "are whole steps, through all stages one after the other, and pulls are those of all\n"
            "workers from a second instance of the same shape.\n\n"
            "Everything is measured in rounds over the whole grid, so that a noisy minute does\n"
            "not spoil a part of it; figures are medians over the rounds."
        ),
        epilog=(
            "examples:\n"
            "  distserve profile --model models/smollm2 --quick\n"
            "  distserve profile --model models/smollm2 --out profiles/smollm2-cpu.json\n"
            "  distserve profile --model DIR --load-format dummy   # config.json is enough\n"
            "  distserve profile --model models/smollm2 --tp 3 --pp 2 --out tp3pp2.json\n\n"
            "Run it on a quiet machine, on the cores a worker will have: taskset -c 1 distserve ..."
        ),
    )
    _add_worker_options(parser.add_argument)
    _add_effort_options(parser.add_argument)
    return parser


def _add_worker_options(add: Callable[..., argparse.Action]) -> None:
    """What a worker of the daemon would have."""
    add("--model", required=True, metavar="DIR", help="a Hugging Face model directory")
    add("--dtype", type=DType, choices=list(DType), default=DType.BF16, help="default: bfloat16")
    add(
        "--load-format",
        type=LoadFormat,
        choices=list(LoadFormat),
        default=LoadFormat.SAFETENSORS,
        help="dummy: random weights, the same times; default: safetensors",
    )
    add("--block-size", type=_count, default=32, help="tokens per KV block; default: 32")
    add("--kv-gib", type=_amount, default=1.0, help="memory for each KV pool, GiB; default: 1")
    add("--threads", type=_count, default=1, help="compute threads of each worker; default: 1")
    add("--tp", type=_count, default=1, help="workers that share every matrix; default: 1")
    add("--pp", type=_count, default=1, help="stages that share the layers; default: 1")


def _add_effort_options(add: Callable[..., argparse.Action]) -> None:
    add("--out", type=Path, metavar="FILE", help="write the table as JSON")
    add("--quick", action="store_true", help="contexts to 512, batches to 8, a few seconds")
    add(
        "--seconds",
        type=_amount,
        metavar="S",
        help=f"time for measuring, beyond which no round is begun; default: {DEFAULT_S:.0f}, "
        f"{QUICK_S:.0f} with --quick",
    )
    add("--max-context", type=_count, default=4096, help="longest context measured; default: 4096")
    add("--max-batch", type=_count, default=32, help="largest decode batch measured; default: 32")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _check_writable(out: Path) -> None:
    """Raises ModelError now and not after a minute of measuring."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("ab"):
            pass
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}") from error


def _profile(arguments: argparse.Namespace, console: Console) -> ProfileTable:
    config = read_config(arguments.model)
    subject = _subject(arguments, min(arguments.max_context, config.max_positions))
    if not has_cores_for(subject):
        console.print(
            f"[yellow]{subject.parallelism.num_workers} workers of {subject.num_threads} thread(s) "
            "take turns on fewer cores: steps are longer than on cores of their own[/yellow]"
        )
    with (
        _progress(console) as (loading, measuring),
        instance(subject, lambda done: loading(done, config.name)) as (engine, leader),
    ):
        effort = _effort(arguments, subject.max_context_tokens)
        return measure(engine, leader.exchange, effort, report=measuring)


def _subject(arguments: argparse.Namespace, max_context: int) -> Subject:
    return Subject(
        model_dir=arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        max_context_tokens=max_context,
        block_size=arguments.block_size,
        kv_bytes=int(arguments.kv_gib * 2**30),
        num_threads=arguments.threads,
        parallelism=Parallelism(arguments.tp, arguments.pp),
    )


def _effort(arguments: argparse.Namespace, max_context: int) -> Effort:
    max_batch = arguments.max_batch
    if arguments.quick:
        max_context, max_batch = min(QUICK_CONTEXT, max_context), min(QUICK_BATCH, max_batch)
    seconds = arguments.seconds or (QUICK_S if arguments.quick else DEFAULT_S)
    stages_s = STAGES_SHARE * seconds if arguments.pp > 1 else 0.0
    return Effort(
        max_context=max_context,
        max_batch=max_batch,
        max_step_tokens=max_context,
        total_s=(1 - KNEE_SHARE) * seconds - stages_s,
        knee_s=KNEE_SHARE * seconds,
        stages_s=stages_s,
    )


@contextmanager
def _progress(console: Console) -> Iterator[tuple[Report, Report]]:
    """Two bars: loading the weights, measuring."""
    columns = (TextColumn("{task.fields[stage]}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tasks = [progress.add_task("", total=1.0, stage=s) for s in ("loading  ", "measuring")]

        def reporter(task: TaskID) -> Report:
            return lambda done, what: progress.update(task, completed=done, description=what)

        yield reporter(tasks[0]), reporter(tasks[1])
