"""Turns a leader's queues into step plans, and step results into events. No sockets, no tensors.

Roles differ only in which queues ever fill: prompts come where prefill is done, handles where
decode is; a mixed instance decodes what it prefilled. Several steps may be under way: what is in
one of them is in no other until it has been collected. Time comes in as an argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_workers.block_pool import BlockPool
from gpu_workers.decode_side import DecodeSide
from gpu_workers.draft import Draft
from gpu_workers.prefill_side import Owner, PrefillSide
from gpu_workers.sequences import PrefillJob
from gpu_workers.step_plan import PullResult, RowResult, StepPlan, StepResult
from ipc.messages import (
    Abort,
    Decode,
    Event,
    MixedPolicy,
    Prefill,
    Refused,
    TokenRow,
    Tokens,
)
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import FinishReason, Parallelism, Role

ALONE = Parallelism()


@dataclass
class Counters:
    """What the instance has done since it started."""

    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    num_pulls: int = 0
    pulled_bytes: int = 0
    pull_faults: int = 0


class Scheduler:
    """One instance's queues, books and policy. `outbox` gathers the events to send.

    `parallelism` says into how many micro-batches decodes are dealt (pp), and whether there are
    followers, who must be told what was drawn; `max_in_flight`, how many steps of one sequence may
    be under way at a time.
    """

    def __init__(
        self,
        owner: Owner,
        role: Role,
        mixed: MixedPolicy,
        *,
        num_blocks: int,
        block_size: int,
        limits: BatchLimits,
        parallelism: Parallelism = ALONE,
        max_in_flight: int = 1,
    ) -> None:
        self.role = role
        self._has_followers = parallelism.num_workers > 1
        self._mixed = mixed
        self._block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefills = PrefillSide(owner, self.pool, block_size=block_size, limits=limits)
        self.decodes = DecodeSide(
            self.pool,
            block_size,
            limits.max_batch,
            parallelism.pp,
            max_in_flight=max_in_flight,
        )
        self.counters = Counters()
        self.outbox: list[Event | Tokens] = []
        self._draft = Draft()

    def set_role(self, role: Role, mixed: MixedPolicy) -> None:
        """What is under way goes on as it began; what comes from now on follows the new role."""
        self.role, self._mixed = role, mixed

    def prefill(self, command: Prefill) -> None:
        num_tokens = len(command.prompt) + len(command.output)
        if num_tokens > self.pool.num_blocks * self._block_size:
            self.refuse(command, f"{num_tokens} tokens do not fit the pool")
            return
        self.prefills.add(command, keep=self.role.decodes)

    def decode(self, command: Decode) -> None:
        self.decodes.add(command)

    def refuse(self, command: Prefill | Decode, reason: str) -> None:
        seq_ids = (
            command.seq_ids
            if isinstance(command, Prefill)
            else tuple(start.seq_id for start in command.sequences)
        )
        self.outbox.append(Refused(command.request_id, seq_ids, reason))

    def abort(self, command: Abort) -> None:
        """Idempotent: what is not here any more was reported when it went."""
        for gone in (
            self.prefills.abort(command.request_id, self._draft),
            self.decodes.abort(command.request_id, command.seq_ids, self._draft),
        ):
            if gone is not None:
                self.outbox.append(gone)

    def peer_down(self, instance: str, epoch: int) -> None:
        self.outbox += self.decodes.peer_down(instance, epoch)
        if self._has_followers:
            self._draft.unmap(instance, epoch)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run and nothing has changed."""
        draft = self._draft
        self.decodes.draft_pulls(draft)
        if self._mixed.chunk_tokens is not None and self.role is Role.MIXED:
            self._draft_chunked(self._mixed.chunk_tokens)
        elif not self.prefills.draft_alone(
            draft, free_blocks=self.decodes.room(), free_places=self._free_places
        ):
            self.outbox += self.decodes.draft_rows(draft)
        if (begun := self.prefills.take_begun()) is not None:
            self.outbox.append(begun)
        return None if draft.is_empty else draft.take()

    def _draft_chunked(self, chunk_tokens: int) -> None:
        self.outbox += self.decodes.draft_rows(self._draft)
        budget = chunk_tokens - len(self._draft.rows)
        self.prefills.draft_chunks(
            self._draft,
            budget=budget,
            free_blocks=self.decodes.room(),
            free_places=self._free_places,
        )

    def launched(self, plan: StepPlan, now_s: float) -> None:
        self.pool.step_launched()
        self.prefills.launched(now_s)
        if not plan.rows:
            return
        prompt_rows = [row for row in plan.rows if self.prefills.owns(row.sequence)]
        num_decodes = len(plan.rows) - len(prompt_rows)
        self.counters.num_steps += 1
        self.counters.prefill_tokens += sum(row.num_new for row in prompt_rows)
        self.counters.decode_tokens += num_decodes
        self.counters.prefill_steps += bool(prompt_rows)
        self.counters.decode_steps += bool(num_decodes)

    def collect(self, result: StepResult, *, started_s: float, ended_s: float) -> None:
        """A launched step has ended: its tokens become events."""
        self.pool.step_collected()
        self.outbox += self.prefills.collect_chunks(
            result.step_id, self._draft, started_s=started_s, ended_s=ended_s
        )
        rows: list[TokenRow] = []
        for row in result.rows:
            if self.prefills.owns(row.sequence):
                self.outbox.append(self.prefills.collect(row, ended_s, self._draft, self._adopt))
            elif (token_row := self._collect_row(result.step_id, row)) is not None:
                rows.append(token_row)
        if rows:
            self.outbox.append(Tokens(started_s, tuple(rows)))

    def _collect_row(self, step_id: int, row: RowResult) -> TokenRow | None:
        token_row = self.decodes.collect(step_id, row, self._draft)
        if token_row is not None and token_row.finished is None and self._has_followers:
            self._draft.drew(row.sequence, row.token_ids[0])
        return token_row

    def pulled(self, result: PullResult) -> None:
        self.counters.num_pulls += 1
        self.counters.pulled_bytes += result.num_bytes
        self.counters.pull_faults += bool(result.num_different)
        self.outbox += self.decodes.pulled(result, self._draft)

    def audit(self) -> list[str]:
        """What the block books and the sequence tables disagree about; empty when all is well."""
        return self.pool.check_integrity(
            [*self.prefills.referenced_blocks, *self.decodes.referenced_blocks]
        )

    @property
    def _free_places(self) -> int:
        """Choices that new prompts may bring into the batch."""
        return self.decodes.free_places - self.prefills.num_to_adopt

    def _adopt(
        self,
        job: PrefillJob,
        token_ids: Sequence[int],
        finished: Sequence[FinishReason | None],
    ) -> None:
        self.decodes.adopt(job, token_ids, finished, self._draft)
