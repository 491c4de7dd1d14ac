"""Carries out step plans on one rank: changes its table, runs the model, draws tokens.

Knows nothing of queues, requests or why a row is in a step. The loop around it is plan -> launch ->
collect; sequence lengths advance at launch, tokens are known at collect. How the tensors of a step
are run is its runner's business. Ranks of one instance carry out the same plans: hidden states pass
from stage to stage, and tp rank 0 of the last stage, the drawer, alone has results.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import msgspec
import torch

from gpu_workers.batch import Batch, BatchRow, build_batch
from gpu_workers.collectives import Alone, Collectives
from gpu_workers.kernels import Kernels
from gpu_workers.kv_exchange import KVExchange
from gpu_workers.models.layers import Model
from gpu_workers.sampler import Draw, Drawn
from gpu_workers.sequence_table import SequenceTable
from gpu_workers.step_plan import BlockCopy, Row, RowResult, StepPlan, StepResult
from gpu_workers.step_runner import EagerRunner, Pending, StepRunner
from ipc.vocabulary import TokenLogprobs

Finish = Callable[[], tuple[RowResult, ...]]
PROMPT_LOGITS_ROWS = 128  # prompt positions whose logits exist at the same time


class Launched(msgspec.Struct, frozen=True):
    """A step under way. Hand it to `Executor.collect`, in launch order."""

    step_id: int
    finish: Finish


class Executor:
    """One rank's engine.

    Args:
        model: this rank's share.
        kernels: what `model` was built with.
        exchange: owner of the pool that `kernels` writes to; begins pulls.
        max_context_tokens: the longest sequence a plan may name.
        num_token_ids: ids from here up are padding of the vocabulary; None if there is none.
        collectives: the way to the other ranks, as given to `model`.
        runner: how steps are run; one after the other on the spot if left out.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        exchange: KVExchange,
        *,
        max_context_tokens: int,
        num_token_ids: int | None = None,
        collectives: Collectives | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        self.model = model
        self.is_drawer = model.shard.is_last_stage and model.shard.tp_rank == 0
        self.kernels = kernels
        self.exchange = exchange
        self.max_context_tokens = max_context_tokens
        self.num_token_ids = min(num_token_ids or model.config.vocab_size, model.config.vocab_size)
        self._runner = runner or EagerRunner(model, kernels, self.num_token_ids)
        self._collectives = collectives or Alone()
        block_size = exchange.pool.shape[4]
        self._await_untold: Callable[[], None] = lambda: None
        self._table = SequenceTable(block_size=block_size, max_tokens=max_context_tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences in this rank's table."""
        return len(self._table)

    @property
    def kernels_name(self) -> str:
        """How this rank computes, for logs and metrics."""
        return self.kernels.name

    @property
    def max_in_flight(self) -> int:
        """Steps of one sequence that may be under way at a time."""
        return self._runner.max_in_flight

    def mark(self) -> Callable[[], None]:
        """As `StepRunner.mark`."""
        return self._runner.mark()

    def launch(self, plan: StepPlan) -> Launched:
        """Carry out a plan: drawn, removed, unmapped, added, blocks, copies, pulls, rows.

        Raises:
            CollectivesFailed: another rank of the instance is gone or silent.
        """
        if not self.is_drawer:
            self._table.append_drawn(plan.drawn)
        for instance, epoch in plan.unmapped:
            self.exchange.unmap_instance(instance, epoch)
        self._table.apply(plan)
        self._copy_blocks(plan.copies)
        if plan.pulls:
            # They write beside the stream, into blocks that work may still use of which the leader
            # cannot know that it goes on.
            self._await_untold()
        for pull in plan.pulls:
            self.exchange.begin(pull)
        return Launched(plan.step_id, self._run(plan.rows) if plan.rows else tuple)

    def collect(self, launched: object) -> StepResult:
        """Wait for a launched step and say what its drawing rows drew, in the plan's order.

        Ranks other than the drawer have no rows to report.
        """
        assert isinstance(launched, Launched)
        return StepResult(launched.step_id, launched.finish())

    def _copy_blocks(self, copies: Items[BlockCopy]) -> None:
        pool = self.exchange.pool
        for copy in copies:
            pool[copy.target].copy_(pool[copy.source])
        if copies:
            self._await_untold = self._runner.mark()  # a step without rows is collected at once

    @torch.inference_mode()
    def _run(self, rows: Items[Row]) -> Finish:
        batch = build_batch(self._table, rows)
        shard, before = self.model.shard, None
        if not shard.is_first_stage:
            before = self._collectives.receive(batch.num_tokens)
        hidden = self._runner.forward(batch, before)  # (T, hidden), at the end (head_rows, hidden)
        for row in batch.rows:
            row.sequence.computed = row.total
        finish: Finish = tuple
        if shard.is_last_stage:
            finish = self._finish(batch, hidden, rows)
        else:
            self._collectives.send_forward(hidden)
        for row in batch.rows:
            row.sequence.num_unseen += row.goes_on
        return finish

    def _finish(self, batch: Batch, hidden: torch.Tensor, rows: Items[Row]) -> Finish:
        """Score and draw; on every rank of the last stage, since they compute logits together."""
        drawing = [row for row in batch.rows if row.draws]
        scored = self._score_prompts(batch, hidden[len(drawing) :])
        draw = self._draw(drawing, hidden[: len(drawing)])
        end = None if drawing else self._runner.mark()
        if not self.is_drawer:  # the rank that draws ends with us, but for what is not drawn
            self._await_untold = end or self._await_untold
            return tuple

        def finish() -> tuple[RowResult, ...]:
            if end is not None:  # nothing comes back by which its end could be told
                end()
            for row, scores in scored:
                row.sequence.prompt_logprobs += scores()
            drawn = iter(draw())
            results = {}
            for row in drawing:
                tokens = [next(drawn) for _ in row.sequence.start.choices]
                results[row.sequence.start.sequence] = _result(row, tokens)
            return tuple(results[row.sequence] for row in rows if row.draws)

        return finish

    def _draw(self, drawing: Items[BatchRow], hidden: torch.Tensor) -> Pending[list[Drawn]]:
        if not drawing:
            return list
        draws, lines = [], []
        for index, row in enumerate(drawing):
            sequence = row.sequence
            start, tokens, unseen = sequence.start, sequence.tokens, sequence.num_unseen
            for choice in start.choices:
                draw = Draw(index, start.sampling, choice, tokens, len(start.prompt), unseen)
                draws.append(draw)
                lines.append(sequence.line if row.goes_on else None)
        return self._runner.draw(hidden, draws, lines)

    def _score_prompts(
        self, batch: Batch, hidden: torch.Tensor
    ) -> list[tuple[BatchRow, Pending[list[TokenLogprobs]]]]:
        """Log probabilities of the prompt tokens that this step's logits are about, in parts."""
        scored, done = [], 0
        for row in batch.rows:
            start, stop = row.prompt_logprob_span
            first = row.computed + 1  # the prompt token that the first of these logits is about
            targets = row.sequence.tokens[first : first + stop - start]
            for offset in range(0, len(targets), PROMPT_LOGITS_ROWS):
                part = targets[offset : offset + PROMPT_LOGITS_ROWS]
                rows = hidden[done + offset : done + offset + len(part)]
                num_top = row.sequence.start.prompt_logprobs or 0
                scored.append((row, self._runner.score(rows, part, num_top)))
            done += len(targets)
        return scored


def _result(row: BatchRow, drawn: Items[Drawn]) -> RowResult:
    """What a row drew; where it goes on in this sequence, its token joins the table."""
    sequence = row.sequence
    token_ids = tuple(token.token_id for token in drawn)
    if row.goes_on:
        sequence.see(token_ids[0])
    logprobs = tuple(token.logprobs for token in drawn if token.logprobs is not None)
    return RowResult(
        sequence.start.sequence,
        token_ids,
        logprobs=logprobs or None,
        prompt_logprobs=sequence.take_prompt_logprobs(),
    )
