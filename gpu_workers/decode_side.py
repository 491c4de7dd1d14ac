"""A leader's choices in decode: those whose cache is to be pulled, and those that run."""

import bisect
from collections.abc import Iterator, Sequence

from gpu_workers.batching import DecodeAdmission, micro_batch_rows
from gpu_workers.block_pool import BlockPool
from gpu_workers.draft import Draft
from gpu_workers.sequences import (
    PrefillJob,
    PullGroup,
    Running,
    finish_reason,
    fork_tables,
)
from gpu_workers.step_plan import NewSequence, Pull, PullResult, Row, RowResult
from ipc.kv_layout import blocks_for
from ipc.messages import (
    Decode,
    Gone,
    Preempted,
    Prefill,
    Pulled,
    Refused,
    SequenceStart,
    TokenRow,
)
from ipc.vocabulary import FinishReason


class DecodeSide:
    """Admits when there is room, runs all that is admitted, preempts the youngest.

    Each step takes those whose last token has come back, or will be on the device in time: up to
    `max_in_flight` steps of a choice are under way. Where `num_micro_batches` steps are under way
    at a time, it takes no more than an even share.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_batch: int,
        num_micro_batches: int = 1,
        *,
        max_in_flight: int = 1,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_batch = max_batch
        self._num_micro_batches = num_micro_batches
        self._max_in_flight = max_in_flight
        self._admission = DecodeAdmission(pool.num_blocks)
        self._waiting: list[PullGroup] = []
        self._pulling: dict[int, PullGroup] = {}
        self._running: dict[int, Running] = {}
        self.num_preempted = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._pulling)

    @property
    def is_pulling(self) -> bool:
        """Copies are under way."""
        return bool(self._pulling)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def free_places(self) -> int:
        """Choices that may still join the batch."""
        return self._max_batch - self._num_admitted

    @property
    def referenced_blocks(self) -> Iterator[int]:
        for group in self._pulling.values():
            yield from group.blocks
        for sequence in self._running.values():
            yield from sequence.blocks

    def room(self) -> int:
        """Blocks that newcomers may take: what is free, less one to grow for each that runs."""
        return self._admission.room(free_blocks=self._pool.num_free, num_running=self._num_admitted)

    def add(self, command: Decode) -> None:
        bisect.insort(
            self._waiting, PullGroup(command, self._block_size), key=lambda g: g.command.arrival
        )

    def adopt(
        self,
        job: PrefillJob,
        token_ids: Sequence[int],
        finished: Sequence[FinishReason | None],
        draft: Draft,
    ) -> None:
        """Decode a prompt that was prefilled here, in the blocks that it has."""
        command = job.command
        starts = [
            SequenceStart(seq_id, choice, (*command.output, token_id))
            for seq_id, choice, token_id in zip(
                command.seq_ids, command.choices, token_ids, strict=True
            )
        ]
        self._fork(command, starts, job.blocks, draft)
        for seq_id, reason in zip(command.seq_ids, finished, strict=True):
            if reason is not None:
                self._end(self._running[seq_id], draft)

    def abort(self, request_id: int, seq_ids: Sequence[int], draft: Draft) -> Gone | None:
        """Forget these choices; a pull that has begun is let finish first."""
        gone = [seq_id for seq_id in seq_ids if seq_id in self._running]
        for seq_id in gone:
            self._end(self._running[seq_id], draft)
        if (pulling := self._pulling.get(request_id)) is not None:
            pulling.aborted.update(seq_ids)
        for group in [g for g in self._waiting if g.command.request_id == request_id]:
            group.aborted.update(seq_ids)
            if group.is_aborted:
                self._waiting.remove(group)
                gone += [start.seq_id for start in group.command.sequences]
        return Gone(request_id=request_id, seq_ids=tuple(gone)) if gone else None

    def peer_down(self, instance: str, epoch: int) -> list[Gone]:
        """Drop what waits to be pulled from an incarnation that has ended."""
        lost = [
            group
            for group in self._waiting
            if (group.command.handle.owner, group.command.handle.epoch) == (instance, epoch)
        ]
        self._waiting = [group for group in self._waiting if group not in lost]
        return [_gone(group) for group in lost]

    def draft_pulls(self, draft: Draft) -> None:
        """Admit the groups that there is room for, in order of arrival."""
        while self._waiting and self._fits(self._waiting[0]):
            group = self._waiting.pop(0)
            group.blocks = self._pool.reserve(group.num_blocks)
            self._pulling[group.command.request_id] = group
            draft.pull(Pull(group.command.handle, group.pulled_blocks))

    def pulled(self, result: PullResult, draft: Draft) -> list[Pulled | Gone | Refused]:
        """A pull has ended: its choices run from the next step on, unless it went wrong."""
        group = self._pulling.pop(result.request_id)
        if result.num_different or result.is_lost:
            self._pool.release(group.blocks)
            return [_spoiled(group, result)]
        events: list[Pulled | Gone | Refused] = [
            Pulled(result.request_id, result.num_bytes, result.started_s, result.ended_s)
        ]
        self._fork(group.command, group.command.sequences, group.blocks, draft)
        if group.aborted:
            aborted = tuple(s for s in group.aborted if s in self._running)
            for seq_id in aborted:
                self._end(self._running[seq_id], draft)
            events.append(Gone(result.request_id, aborted))
        return events

    def draft_rows(self, draft: Draft) -> list[Preempted]:
        """One new token for each choice that can run, the oldest first; the youngest make room
        where blocks lack."""
        preempted: list[Preempted] = []
        limit = micro_batch_rows(len(self._running), self._num_micro_batches)
        ready = [s for s in self._running.values() if s.can_run(self._max_in_flight)]
        for sequence in sorted(ready, key=lambda s: s.age):
            if len(draft.rows) >= limit:
                break
            if sequence.seq_id not in self._running:
                continue
            if self._grow(sequence, draft, preempted):
                sequence.num_computed += 1
                sequence.num_planned += 1
                sequence.step_ids.append(draft.step_id)
                draft.rows.append(Row(sequence.seq_id, 1, draws=True))
        return preempted

    def collect(self, step_id: int, row: RowResult, draft: Draft) -> TokenRow | None:
        """A drawn token; None when its choice has left meanwhile (and perhaps come back)."""
        sequence = self._running.get(row.sequence)
        if sequence is None or sequence.step_ids[:1] != [step_id]:
            return None
        del sequence.step_ids[0]
        sequence.num_output += 1
        reason = finish_reason(row.token_ids[0], sequence.sampling, sequence.num_output)
        if reason is not None:
            self._end(sequence, draft)
        return TokenRow(sequence.seq_id, row.token_ids, reason, row.logprobs)

    @property
    def _num_admitted(self) -> int:
        """Choices that run or will when their pull has ended."""
        pulling = sum(len(group.command.sequences) for group in self._pulling.values())
        return len(self._running) + pulling

    def _fits(self, group: PullGroup) -> bool:
        num_new = len(group.command.sequences)
        is_batch_full = self._num_admitted > 0 and num_new > self.free_places
        return not is_batch_full and group.num_blocks <= self.room()

    def _grow(self, sequence: Running, draft: Draft, preempted: list[Preempted]) -> bool:
        """Make sure that the next token has its slot; False when the choice itself had to go, or
        must wait for blocks that steps under way may still use."""
        if blocks_for(sequence.num_computed + 1, self._block_size) <= len(sequence.blocks):
            return True
        while self._pool.num_free == 0:
            if self._pool.num_retiring:
                return False
            youngest = max(self._running.values(), key=lambda s: s.age)
            self._preempt(youngest, draft, preempted)
            if youngest is sequence:
                return False
        block_ids = self._pool.reserve(1)
        sequence.blocks += block_ids
        draft.grow(sequence.seq_id, block_ids)
        return True

    def _preempt(self, sequence: Running, draft: Draft, preempted: list[Preempted]) -> None:
        self._admission.preempted()
        self.num_preempted += 1
        self._end(sequence, draft)
        preempted.append(Preempted(sequence.seq_id))

    def _end(self, sequence: Running, draft: Draft) -> None:
        del self._running[sequence.seq_id]
        draft.remove(sequence.seq_id)
        self._pool.release(sequence.blocks)

    def _fork(
        self,
        command: Prefill | Decode,
        starts: Sequence[SequenceStart],
        blocks: Sequence[int],
        draft: Draft,
    ) -> None:
        num_computed = len(command.prompt) + len(starts[0].output) - 1
        fork = fork_tables(blocks, num_computed, len(starts), self._block_size)
        for _ in starts[1:]:
            self._pool.share(fork.shared)
        draft.copy(fork.copies)
        for start, table in zip(starts, fork.tables, strict=True):
            self._run(command, start, table, draft)

    def _run(
        self, command: Prefill | Decode, start: SequenceStart, table: list[int], draft: Draft
    ) -> None:
        num_output = len(start.output)
        num_computed = len(command.prompt) + num_output - 1
        self._running[start.seq_id] = Running(
            seq_id=start.seq_id,
            choice=start.choice,
            arrival=command.arrival,
            sampling=command.sampling,
            blocks=table,
            num_computed=num_computed,
            num_output=num_output,
            num_planned=num_output,
        )
        sequence = NewSequence(
            sequence=start.seq_id,
            choices=(start.choice,),
            prompt=command.prompt,
            output=start.output,
            num_computed=num_computed,
            sampling=command.sampling,
        )
        draft.add(sequence, table)


def _gone(group: PullGroup) -> Gone:
    seq_ids = tuple(start.seq_id for start in group.command.sequences)
    return Gone(request_id=group.command.request_id, seq_ids=seq_ids)


def _spoiled(group: PullGroup, result: PullResult) -> Refused:
    seq_ids = tuple(start.seq_id for start in group.command.sequences)
    reason = f"{result.num_different} pulled blocks differ from their source"
    if result.is_lost:
        reason = f"not all blocks were pulled: {result.loss}"
    return Refused(result.request_id, seq_ids, reason)
