"""Drive one executor by plans of our own: prompts in, greedy tokens out."""

import itertools
import random
from collections import deque
from collections.abc import Sequence

from gpu_workers.executor import Executor, Launched
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, RowResult, StepPlan, StepResult
from ipc.kv_layout import blocks_for
from ipc.vocabulary import SamplingParams


class Driver:
    """Deals out scattered blocks, none of them the pool's last (a GPU keeps that for padding).

    Args:
        in_flight: steps that are under way at a time; above 1, steps are launched whose input
            the step before has yet to draw.
    """

    def __init__(self, executor: Executor, *, in_flight: int = 1) -> None:
        self._executor = executor
        self._in_flight = in_flight
        num_blocks, _, _, _, self._block_size, _ = executor.exchange.pool.shape
        self._num_blocks = num_blocks - 1
        self._steps = itertools.count()

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """So many tokens after each prompt: all prompts in one step, then decodes together."""
        ids = range(len(prompts))
        drawn: dict[int, list[int]] = {i: [] for i in ids}
        under_way = deque([self._executor.launch(self._entry(prompts, num_tokens))])
        for _ in range(num_tokens - 1):
            if len(under_way) == self._in_flight:
                self._take(under_way, drawn)
            plan = StepPlan(step_id=next(self._steps), rows=tuple(Row(i, 1, True) for i in ids))
            under_way.append(self._executor.launch(plan))
        while under_way:
            self._take(under_way, drawn)
        self._run(StepPlan(step_id=next(self._steps), removed=tuple(ids)))
        return [drawn[i] for i in ids]

    def gaps(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """For each token of an output: how many nats it is less likely there than the likeliest."""
        whole = [*prompt, *output]
        entry = self._entry([whole], 1, prompt_logprobs=1)
        (row,) = self._run(entry).rows
        self._run(StepPlan(step_id=next(self._steps), removed=(0,)))
        return _gaps(row, len(prompt), whole)

    def _take(self, under_way: deque[Launched], drawn: dict[int, list[int]]) -> None:
        for row in self._executor.collect(under_way.popleft()).rows:
            drawn[row.sequence] += row.token_ids

    def _run(self, plan: StepPlan) -> StepResult:
        return self._executor.collect(self._executor.launch(plan))

    def _entry(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        prompt_logprobs: int | None = None,
    ) -> StepPlan:
        sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0)
        needs = [blocks_for(len(prompt) + num_tokens, self._block_size) for prompt in prompts]
        scattered = iter(random.Random(0).sample(range(self._num_blocks), sum(needs)))
        return StepPlan(
            step_id=next(self._steps),
            added=tuple(
                NewSequence(i, (0,), tuple(prompt), (), 0, sampling, prompt_logprobs)
                for i, prompt in enumerate(prompts)
            ),
            blocks=tuple(
                NewBlocks(i, tuple(next(scattered) for _ in range(need)))
                for i, need in enumerate(needs)
            ),
            rows=tuple(Row(i, len(prompt), True) for i, prompt in enumerate(prompts)),
        )


def _gaps(row: RowResult, num_prompt: int, whole: Sequence[int]) -> list[float]:
    """Entry i of a prompt's log probabilities is about its i-th token."""
    assert row.prompt_logprobs is not None, "they were asked for"
    found = []
    for entry, token in zip(row.prompt_logprobs[num_prompt:], whole[num_prompt:], strict=True):
        assert entry is not None
        assert entry.token_id == token, "log probabilities of another token"
        likeliest = max(logprob for _, logprob in entry.top)
        found.append(likeliest - entry.logprob)
    return found
