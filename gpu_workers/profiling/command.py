"""The command `distserve profile`: defaults, progress, the table as JSON and on the terminal."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gpu_workers.errors import ModelError
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.profiling.measure import Effort, Report, measure
from gpu_workers.profiling.options import parse
from gpu_workers.profiling.places import Machine, ThisMachine
from gpu_workers.profiling.ranks import FAULTS, has_cores_for
from gpu_workers.profiling.report import show
from gpu_workers.profiling.subject import Subject
from gpu_workers.profiling.whole_instance import instance
from ipc.profile_table import ProfileTable
from ipc.vocabulary import Parallelism

QUICK_CONTEXT, QUICK_BATCH, QUICK_S = 512, 8, 9.0
KNEE_SHARE = 0.1  # of the seconds, spent on the prompts near L_m
STAGES_SHARE = 0.15  # and on how steps follow each other through the stages, if there are several


def main(argv: Sequence[str], machine: Machine | None = None) -> int:
    """Returns the exit code."""
    machine = machine or ThisMachine()
    arguments = parse(argv)
    console = Console(stderr=True)
    try:
        if arguments.out is not None:
            _check_writable(arguments.out)
        table = _profile(arguments, machine, console)
    except FAULTS as error:
        sys.stderr.write(f"distserve profile: {error}\n")
        return 1
    if arguments.out is not None:
        arguments.out.write_bytes(orjson.dumps(msgspec.to_builtins(table)))
    show(table, Console())
    return 0


def _check_writable(out: Path) -> None:
    """Raises ModelError now and not after a minute of measuring."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("ab"):
            pass
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}") from error


class Defaults(NamedTuple):
    """What is measured where nothing is said, and for how long."""

    max_context: int
    max_batch: int
    kv_gib: float
    seconds: float


ON_CPU = Defaults(max_context=4096, max_batch=32, kv_gib=1.0, seconds=75.0)
ON_GPU = Defaults(max_context=8192, max_batch=256, kv_gib=0.0, seconds=60.0)


def _profile(arguments: argparse.Namespace, machine: Machine, console: Console) -> ProfileTable:
    first_gpu = _first_gpu(arguments.device, machine)
    defaults = ON_CPU if first_gpu is None else ON_GPU
    subject = _subject(arguments, read_config(arguments.model), defaults, first_gpu)
    subject = msgspec.structs.replace(subject, pull_from=_pull_from(arguments, subject, machine))
    if first_gpu is None and not has_cores_for(subject):
        console.print(
            f"[yellow]{subject.parallelism.num_workers} workers of {subject.num_threads} thread(s) "
            "take turns on fewer cores: steps are longer than on cores of their own[/yellow]"
        )
    name = Path(arguments.model).name
    with (
        _progress(console) as (loading, measuring),
        instance(subject, lambda done: loading(done, name), machine) as (engine, leader),
    ):
        return measure(engine, leader, _effort(arguments, subject, defaults), report=measuring)


def _first_gpu(device: str, machine: Machine) -> int | None:
    """The leader's; None for the CPU."""
    if device == "cpu" or (device == "auto" and not machine.num_gpus):
        return None
    return int(device.partition(":")[2] or 0)


def _pull_from(arguments: argparse.Namespace, subject: Subject, machine: Machine) -> int | None:
    """The first GPU of the other instance: beside ours where there are so many, as in a service
    with a GPU for each worker; else each worker's own."""
    if subject.first_gpu is None:
        return None
    if arguments.pull_from is not None:
        return int(arguments.pull_from)
    beside = subject.first_gpu + subject.parallelism.num_workers
    has_room = beside + subject.parallelism.num_workers <= machine.num_gpus
    return beside if has_room else subject.first_gpu


def _subject(
    arguments: argparse.Namespace, config: ModelConfig, defaults: Defaults, first_gpu: int | None
) -> Subject:
    kv_gib = arguments.kv_gib or defaults.kv_gib
    return Subject(
        model_dir=arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        max_context_tokens=min(arguments.max_context or defaults.max_context, config.max_positions),
        block_size=arguments.block_size,
        kv_bytes=int(kv_gib * 2**30),
        num_threads=arguments.threads,
        parallelism=Parallelism(arguments.tp, arguments.pp),
        first_gpu=first_gpu,
        gpu_memory_utilization=None if kv_gib else arguments.gpu_memory_utilization,
        max_batch=_max_batch(arguments, defaults),
    )


def _max_batch(arguments: argparse.Namespace, defaults: Defaults) -> int:
    asked = int(arguments.max_batch or defaults.max_batch)
    return min(QUICK_BATCH, asked) if arguments.quick else asked


def _effort(arguments: argparse.Namespace, subject: Subject, defaults: Defaults) -> Effort:
    max_context = subject.max_context_tokens
    if arguments.quick:
        max_context = min(QUICK_CONTEXT, max_context)
    seconds = arguments.seconds or (QUICK_S if arguments.quick else defaults.seconds)
    stages_s = STAGES_SHARE * seconds if arguments.pp > 1 else 0.0
    return Effort(
        max_context=max_context,
        max_batch=subject.max_batch,
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
