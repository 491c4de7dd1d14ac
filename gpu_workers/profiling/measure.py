"""Measure an instance's steps and pulls in rounds and put the planner's table together."""

from collections.abc import Callable
from contextlib import closing
from functools import partial

import msgspec
import torch

from gpu_workers.errors import ModelError
from gpu_workers.profiling.bench import PEER, Engine, PullBench, StepBench
from gpu_workers.profiling.grid import CONTEXTS, Grid, Room, StepShape
from gpu_workers.profiling.pipelining import slowest_stage
from gpu_workers.profiling.ranks import Rank, without_collector
from gpu_workers.profiling.rounds import (
    Budget,
    Once,
    relative_spread,
    sample_in_rounds,
    settled_median,
)
from gpu_workers.profiling.saturation import is_near_knee, saturation_tokens
from ipc.profile_table import (
    DecodePoint,
    MixedPoint,
    PrefillPoint,
    ProfileTable,
    TransferPoint,
)
from ipc.vocabulary import WorkerName

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
    engine: Engine,
    rank: Rank,
    effort: Effort,
    *,
    report: Report = lambda fraction, what: None,
) -> ProfileTable:
    """Run the grid that fits the engine's context and pool, and find L_m.

    Args:
        engine: a fresh one; its table must be empty, its pool is overwritten.
        rank: the engine's own, or its leader's; a second pool is connected to it for the pulls.
        effort: the largest batch and context, and the seconds.
        report: called with the fraction done and what is being done.

    Raises:
        ModelError: the pool is too small for a single step.
    """
    room = Room(
        num_blocks=rank.num_blocks,
        block_size=rank.exchange.layout.block_size,
        max_context=min(effort.max_context, engine.max_context_tokens),
        max_batch=effort.max_batch,
        max_step_tokens=effort.max_step_tokens,
    )
    grid = Grid.of(room)
    if not grid.prefill or not grid.decode:
        raise ModelError(
            f"the KV pool or the context is too small to measure anything: a context of "
            f"{room.max_context} tokens in {room.num_blocks} blocks of {room.block_size}, where a "
            f"decode has {CONTEXTS[0]} at least"
        )
    parallelism = engine.model.shard.parallelism
    rank.exchange.pool.fill_(0.5)  # so that its memory is there
    with (
        torch.inference_mode(),
        without_collector(),
        closing(rank.place.stopwatch(is_alone=parallelism.num_workers == 1)) as stopwatch,
        rank.place.twin(rank.exchange, max(grid.pulls), WorkerName(PEER)) as num_peer_blocks,
    ):
        steps = StepBench(engine, stopwatch, rank.num_blocks)
        pulls = PullBench(engine, stopwatch, rank.num_blocks, num_peer_blocks)
        samples = _sample(grid, steps, pulls, effort, report)
        budget = Budget(effort.stages_s, 0.0, effort.max_rounds)
        slowest = slowest_stage(steps, grid, room, parallelism.pp, budget)
        path = rank.exchange.pull_path
    return msgspec.structs.replace(
        _table(engine, rank, grid, samples),
        slowest_stage=slowest,
        waited=stopwatch.waited_s / stopwatch.total_s,
        pull_path=path,
    )


def _sample(
    grid: Grid, steps: StepBench, pulls: PullBench, effort: Effort, report: Report
) -> Samples:
    """The whole grid in rounds, then again the prompts near the knee."""
    points: dict[Point, Once] = {step: partial(steps.served_ms, step) for step in grid.steps}
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


def _table(engine: Engine, rank: Rank, grid: Grid, samples: Samples) -> ProfileTable:
    ms = {point: settled_median(taken) for point, taken in samples.items()}
    layout, parallelism = rank.exchange.layout, engine.model.shard.parallelism
    return ProfileTable(
        model=engine.model.config.name,
        device=rank.place.device_name,
        device_kind=rank.place.kind,
        kernels=engine.kernels_name,
        dtype=layout.dtype,
        tp=parallelism.tp,
        pp=parallelism.pp,
        block_size=layout.block_size,
        num_threads=torch.get_num_threads(),
        saturation_tokens=saturation_tokens(_prefill_points(grid, samples, min)),
        kv_bytes_per_token=engine.model.config.kv_bytes_per_token(layout.dtype),
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
