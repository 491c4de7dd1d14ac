"""Drive an executor by hand-made step plans, as a leader would, one engine in this process."""

import random
from collections.abc import Sequence
from pathlib import Path

from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.models.config import read_config
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, RowResult, StepPlan
from ipc.kv_layout import blocks_for
from ipc.vocabulary import DType, SamplingParams

MAX_CONTEXT = 256


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "seed": 0, "temperature": 0.0, **changes})


class Driver:
    """An executor with books of its own: deals out scattered blocks and counts steps."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: DType = DType.FP32,
        block_size: int = 16,
        num_token_ids: int | None = None,
    ) -> None:
        self.config = read_config(model_dir)
        spec = EngineSpec(
            model_dir=str(model_dir),
            dtype=dtype,
            max_context_tokens=MAX_CONTEXT,
            num_token_ids=num_token_ids,
        )
        token_bytes = self.config.kv_bytes_per_token(dtype)
        self.layout = pool_layout(
            self.config, dtype=dtype, block_size=block_size, kv_bytes=4096 * token_bytes
        )
        self.block_size = block_size
        self.pool = PrivatePool(self.layout)
        self.executor = build_executor(self.config, spec, self.pool)
        self.free = list(range(self.layout.num_blocks))
        random.Random(0).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.num_steps = 0
        self._added: list[NewSequence] = []
        self._removed: list[int] = []

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        output: Sequence[int] = (),
        choices: tuple[int, ...] = (0,),
        prompt_logprobs: int | None = None,
        num_computed: int = 0,
    ) -> int:
        """Enter a sequence with the next step; returns its id."""
        sequence = 1 + max(self.blocks, default=0)
        self.blocks[sequence] = []
        self.lengths[sequence] = num_computed
        self._added.append(
            NewSequence(
                sequence,
                choices,
                tuple(prompt),
                tuple(output),
                num_computed,
                sampling,
                prompt_logprobs,
            )
        )
        return sequence

    def remove(self, sequence: int) -> None:
        """Leave with the next step; the blocks may be dealt out again at once."""
        self._removed.append(sequence)
        self.free += self.blocks.pop(sequence)
        del self.lengths[sequence]

    def step(self, *rows: tuple[int, int, bool]) -> dict[int, RowResult]:
        """Run rows of (sequence, new tokens, draws)."""
        blocks = [self._grow(sequence, num_new) for sequence, num_new, _ in rows]
        plan = StepPlan(
            step_id=self.num_steps,
            removed=tuple(self._removed),
            added=tuple(self._added),
            blocks=tuple(new for new in blocks if new.block_ids),
            rows=tuple(Row(*row) for row in rows),
        )
        self._removed, self._added = [], []
        self.num_steps += 1
        result = self.executor.collect(self.executor.launch(plan))
        assert result.step_id == plan.step_id
        return {row.sequence: row for row in result.rows}

    def prefill(self, sequence: int, num_tokens: int, *, chunk: int | None = None) -> RowResult:
        """Compute so many tokens, in chunks, and draw after the last."""
        done = 0
        while num_tokens - done > (chunk or num_tokens):
            assert self.step((sequence, chunk or num_tokens, False)) == {}
            done += chunk or num_tokens
        return self.step((sequence, num_tokens - done, True))[sequence]

    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        chunk: int | None = None,
    ) -> list[int]:
        """One prompt alone, prefilled and decoded."""
        sequence = self.add(prompt, sampling or greedy())
        drawn = [*self.prefill(sequence, len(prompt), chunk=chunk).token_ids]
        while len(drawn) < num_tokens:
            drawn += self.step((sequence, 1, True))[sequence].token_ids
        self.remove(sequence)
        return drawn

    def _grow(self, sequence: int, num_new: int) -> NewBlocks:
        self.lengths[sequence] += num_new
        held = self.blocks[sequence]
        missing = blocks_for(self.lengths[sequence], self.block_size) - len(held)
        new = tuple(self.free.pop() for _ in range(missing))
        held += new
        return NewBlocks(sequence, new)
