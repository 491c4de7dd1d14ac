"""Drive one executor by plans of our own: prompts in, greedy tokens out."""

import itertools
import random
from collections.abc import Sequence

from gpu_workers.executor import Executor
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, StepPlan, StepResult
from ipc.kv_layout import blocks_for
from ipc.vocabulary import SamplingParams


class Driver:
    """Deals out scattered blocks, none of them the pool's last (a GPU keeps that for padding)."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        num_blocks, _, _, _, self._block_size, _ = executor.exchange.pool.shape
        self._num_blocks = num_blocks - 1
        self._steps = itertools.count()

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """So many tokens after each prompt: all prompts in one step, then decodes together."""
        ids = range(len(prompts))
        first = self._run(self._entry(prompts, num_tokens))
        drawn = {row.sequence: [*row.token_ids] for row in first.rows}
        for _ in range(num_tokens - 1):
            plan = StepPlan(step_id=next(self._steps), rows=tuple(Row(i, 1, True) for i in ids))
            for row in self._run(plan).rows:
                drawn[row.sequence] += row.token_ids
        self._run(StepPlan(step_id=next(self._steps), removed=tuple(ids)))
        return [drawn[i] for i in ids]

    def _run(self, plan: StepPlan) -> StepResult:
        return self._executor.collect(self._executor.launch(plan))

    def _entry(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> StepPlan:
        sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0)
        needs = [blocks_for(len(prompt) + num_tokens, self._block_size) for prompt in prompts]
        scattered = iter(random.Random(0).sample(range(self._num_blocks), sum(needs)))
        return StepPlan(
            step_id=next(self._steps),
            added=tuple(
                NewSequence(i, (0,), tuple(prompt), (), 0, sampling)
                for i, prompt in enumerate(prompts)
            ),
            blocks=tuple(
                NewBlocks(i, tuple(next(scattered) for _ in range(need)))
                for i, need in enumerate(needs)
            ),
            rows=tuple(Row(i, len(prompt), True) for i, prompt in enumerate(prompts)),
        )
