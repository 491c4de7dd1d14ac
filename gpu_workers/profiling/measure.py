"""Measure an instance's steps and pulls in rounds and put the planner's table together."""

import gc
import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch

from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.errors import ModelError
from gpu_workers.profiling.bench import Engine, PullBench, StepBench, connected
from gpu_workers.profiling.grid import Grid, Room, StepShape
from gpu_workers.profiling.pipelining import slowest_stage
from gpu_workers.profiling.rounds import (
    Budget,
    Once,
    relative_spread,
    sample_in_rounds,
    settled_median,
)
from gpu_workers.profiling.saturation import is_near_knee, saturation_tokens
from gpu_workers.profiling.stopwatch import Stopwatch
from ipc.kv_layout import RankLayout
from ipc.profile_table import (
    DecodePoint,
    MixedPoint,
    PrefillPoint,
    ProfileTable,
    TransferPoint,
)

Report = Callable[[float, str], None]
Point = StepShape | int  # a step, or the number of tokens of a pull
Samples = dict[Point, list[float]]


class Effort(msgspec.Struct, frozen=True):
    """How much to measure, and how long: see `Budget` for the bounds of time.

    After `total_s` for the whole grid, `knee_s` go to the prompts that decide about L_m alone, and
    `stages_s`, where there are several, to steps that follow each other through them.
    """

    max_context: int
    max_batch: int
    max_step_tokens: int
    total_s: float
    knee_s: float
    stages_s: float = 1.0
    visit_s: float = 0.05
    max_rounds: int = 12


def measure(
    executor: Engine,
    exchange: CpuExchange,
    effort: Effort,
    *,
    report: Report = lambda fraction, what: None,
) -> ProfileTable:
    """Run the grid that fits the executor's context and pool, and find L_m.

    Args:
        executor: a fresh one; its table must be empty, its pool is overwritten.
        exchange: the executor's own, or its leader's; a second pool is connected to it for the
            pulls.
        effort: the largest batch and context, and the seconds.
        report: called with the fraction done and what is being done.

    Raises:
        ModelError: the pool is too small for a single step.
    """
    shape = exchange.layout
    room = Room(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_context=min(effort.max_context, executor.max_context_tokens),
        max_batch=effort.max_batch,
        max_step_tokens=effort.max_step_tokens,
    )
    grid = Grid.of(room)
    if not grid.prefill or not grid.decode:
        raise ModelError("the KV pool or the context is too small to measure anything")
    parallelism = executor.model.shard.parallelism
    is_alone = parallelism.num_workers == 1
    exchange.pool.fill_(0.5)  # so that its memory is there
    with (
        torch.inference_mode(),
        _without_collector(),
        closing(Stopwatch(is_alone=is_alone)) as stopwatch,
        connected(executor, exchange, stopwatch, max(grid.pulls)) as pulls,
    ):
        steps = StepBench(executor, stopwatch)
        samples = _sample(grid, steps, pulls, effort, report)
        budget = Budget(effort.stages_s, 0.0, effort.max_rounds)
        slowest = slowest_stage(steps, grid, room, parallelism.pp, budget)
    table = _table(executor, shape, grid, samples)
    waited = stopwatch.waited_s / stopwatch.total_s
    return msgspec.structs.replace(table, slowest_stage=slowest, waited=waited)


def _sample(
    grid: Grid, steps: StepBench, pulls: PullBench, effort: Effort, report: Report
) -> Samples:
    """The whole grid in rounds, then again the prompts near the knee."""
    points: dict[Point, Once] = {step: partial(steps.step_ms, step) for step in grid.steps}
    points |= {tokens: partial(pulls.pull_ms, tokens) for tokens in grid.pulls}
    whole = effort.total_s / (effort.total_s + effort.knee_s)
    samples = sample_in_rounds(
        points,
        Budget(effort.total_s, effort.visit_s, effort.max_rounds),
        progress=lambda done: report(whole * done, f"{len(points)} steps and pulls, in rounds"),
    )
    saturation = saturation_tokens(_prefill_points(grid, samples, min))
    knee = [step for step in grid.single if is_near_knee(step.num_new, saturation)]
    again = sample_in_rounds(
        {step: points[step] for step in knee},
        Budget(effort.knee_s, effort.visit_s, effort.max_rounds),
        progress=lambda done: report(whole + (1 - whole) * done, f"prompts near {saturation}"),
    )
    return samples | {step: [*samples[step], *again[step]] for step in knee}


def _table(executor: Engine, layout: RankLayout, grid: Grid, samples: Samples) -> ProfileTable:
    ms = {point: settled_median(taken) for point, taken in samples.items()}
    parallelism = executor.model.shard.parallelism
    return ProfileTable(
        model=executor.model.config.name,
        device=_device_name(),
        kernels=executor.kernels_name,
        dtype=layout.dtype,
        tp=parallelism.tp,
        pp=parallelism.pp,
        block_size=layout.block_size,
        num_threads=torch.get_num_threads(),
        saturation_tokens=saturation_tokens(_prefill_points(grid, samples, min)),
        kv_bytes_per_token=executor.model.config.kv_bytes_per_token(layout.dtype),
        prefill=tuple(_prefill_points(grid, samples, settled_median)),
        decode=tuple(DecodePoint(step.batch, step.context, ms[step]) for step in grid.decode),
        mixed=tuple(
            MixedPoint(step.num_new, step.num_cached, step.batch, step.context, ms[step])
            for step in grid.mixed
        ),
        transfer=tuple(TransferPoint(tokens, ms[tokens]) for tokens in grid.pulls),
        spread=relative_spread([samples[step] for step in grid.steps]),
    )


def _prefill_points(
    grid: Grid, samples: Samples, typical: Callable[[list[float]], float]
) -> list[PrefillPoint]:
    """`typical` is the median for the table. L_m is found by the quickest runs: other work on the
    machine can only slow a run down, and it may well shift the ratio of two medians by the tenth
    that the rule asks about."""
    return [
        PrefillPoint(step.num_prompts, step.num_new, typical(samples[step]))
        for step in grid.prefill
    ]


@contextmanager
def _without_collector() -> Iterator[None]:
    """No pauses by Python's garbage collector, as in a worker's step loop."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _device_name() -> str:
    """The processor's own name, or the machine's kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
