"""Decode steps that follow each other are asked for as a leader asks for them."""

from types import SimpleNamespace
from typing import Any

import torch

from gpu_workers.profiling.bench import NUM_FOLLOWING, StepBench
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.step_plan import DrawnToken, RowResult, StepPlan, StepResult


class Recorder:
    """An engine that keeps its plans, and how many were under way at most."""

    num_token_ids, max_context_tokens, kernels_name = 50, 128, "recorded"
    model: Any = None

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.exchange: Any = SimpleNamespace(pool=torch.empty(64, 1, 1, 2, 16, 8, device="meta"))
        self.plans: list[StepPlan] = []
        self.most = self._under_way = 0

    def launch(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        return plan

    def collect(self, launched: Any) -> StepResult:
        self._under_way -= 1
        rows = tuple(RowResult(row.sequence, (launched.step_id,)) for row in launched.rows)
        return StepResult(launched.step_id, rows)


def run(engine: Recorder, step: StepShape) -> list[StepPlan]:
    """What was asked of the engine."""
    bench = StepBench(engine, Stopwatch(), num_blocks=63)
    assert bench.served_ms(step) >= 0
    return engine.plans


def test_decodes_follow_each_other_as_many_under_way_as_the_engine_takes() -> None:
    engine = Recorder(max_in_flight=2)
    entry, *steps, last = run(engine, StepShape(batch=2, context=100))
    assert engine.most == 2
    assert len(steps) == NUM_FOLLOWING
    assert all([row.sequence for row in plan.rows] == [0, 1] for plan in steps)
    assert last.removed == (0, 1)
    computed = {start.num_computed for start in entry.added}
    assert computed == {100 - NUM_FOLLOWING}  # the last of the steps has a context of 100
    assert {len(new.block_ids) for new in entry.blocks} == {7}


def test_what_one_drew_is_told_by_the_first_plan_after_it_was_collected() -> None:
    _, *steps, _ = run(Recorder(max_in_flight=2), StepShape(batch=1, context=40))
    told = [plan.drawn for plan in steps]
    assert told[:2] == [(), ()]
    assert told[2:] == [(DrawnToken(0, step),) for step in range(NUM_FOLLOWING - 2)]


def test_a_step_at_a_time_is_a_step_alone_and_so_is_every_prompt() -> None:
    for engine, step in (
        (Recorder(max_in_flight=1), StepShape(batch=2, context=40)),
        (Recorder(max_in_flight=2), StepShape(num_prompts=1, num_new=40)),
    ):
        assert len(run(engine, step)) == 3  # enter, step, leave
        assert engine.most == 1


def test_the_pools_last_blocks_are_nobodys_where_they_are_spare() -> None:
    entry, *_ = run(Recorder(max_in_flight=1), StepShape(batch=9, context=112))
    assert max(block for new in entry.blocks for block in new.block_ids) == 62
