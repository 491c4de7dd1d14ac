"""How steps follow each other through the stages of a pipeline: at the slowest stage's distance.

A step's own time says nothing of that: stages are cut by cost, the head counts, and what it costs
differs between the phases. So one step of each phase is run alone, and run again with as many
under way as there are stages; the ratio is the slowest stage's share.
"""

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from gpu_workers.profiling.grid import Grid, Room, StepShape
from gpu_workers.profiling.rounds import Budget, Once, sample_in_rounds
from ipc.profile_table import StageShares

NUM_TOKENS, BATCH, CONTEXT = 512, 8, 256  # of the steps, or as near below as has room


class Steps(Protocol):
    """Runs steps: one alone, and several in a row with so many under way at a time."""

    def step_ms(self, step: StepShape) -> float: ...

    def interval_ms(self, step: StepShape, num_steps: int, in_flight: int) -> float: ...


def slowest_stage(
    steps: Steps, grid: Grid, room: Room, pp: int, budget: Budget
) -> StageShares | None:
    """None where there is one stage, or where the pool has no room for steps in a row."""
    if pp == 1:
        return None
    prompt = _prompt(_in_a_row(grid.single, room, pp))
    decode = _decode(_in_a_row(grid.decode, room, pp))
    if prompt is None or decode is None:
        return None
    points: dict[tuple[StepShape, bool], Once] = {}
    for step in (prompt, decode):
        points[step, False] = partial(steps.step_ms, step)
        num_steps = min(2 * pp + 2, room.times(step))
        points[step, True] = partial(steps.interval_ms, step, num_steps, pp)
    # The quickest ones: others on the machine slow steps in a row more than one alone.
    ms = {point: min(taken) for point, taken in sample_in_rounds(points, budget).items()}
    shares = [min(1.0, max(1 / pp, ms[step, True] / ms[step, False])) for step in (prompt, decode)]
    return StageShares(*shares)


def _in_a_row(steps: Iterable[StepShape], room: Room, pp: int) -> list[StepShape]:
    """Those of which more than fill the pipeline have room at the same time."""
    return [step for step in steps if room.times(step) > pp]


def _prompt(steps: list[StepShape]) -> StepShape | None:
    fitting = [step for step in steps if step.num_new <= NUM_TOKENS]
    return max(fitting, key=lambda step: step.num_new, default=None)


def _decode(steps: list[StepShape]) -> StepShape | None:
    """The largest batch first: a short context is better than a small batch."""
    fitting = [step for step in steps if step.batch <= BATCH and step.context <= CONTEXT]
    return max(fitting, key=lambda step: (step.batch, step.context), default=None)
