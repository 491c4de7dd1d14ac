"""A leader's prompts: those that wait, those in the running step, those held for their readers."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from gpu_workers.block_pool import BlockPool
from gpu_workers.draft import Draft
from gpu_workers.sequences import PrefillJob, finish_reason
from gpu_workers.step_plan import NewSequence, Row, RowResult
from ipc.kv_layout import blocks_for
from ipc.messages import Begun, Chunked, Gone, Prefill, Prefilled
from ipc.prefill_policy import BatchLimits, FirstComeFirstServed, Turn, prefill_queue
from ipc.vocabulary import FinishReason, KVHandle


class Owner(msgspec.Struct, frozen=True):
    """Whose handles these are."""

    instance: str
    epoch: int


class PrefillSide:
    """The queue says who is next. All blocks of a prompt are reserved when it starts, and kept
    between its chunks, so that what has started never waits for blocks."""

    def __init__(
        self, owner: Owner, pool: BlockPool, *, block_size: int, limits: BatchLimits
    ) -> None:
        self._owner = owner
        self._pool = pool
        self._block_size = block_size
        self._queue: FirstComeFirstServed[PrefillJob] = prefill_queue(limits)
        self._waiting: dict[int, PrefillJob] = {}
        self._started: dict[int, PrefillJob] = {}
        self._begun: list[int] = []  # of these, those that nobody has been told of

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_to_adopt(self) -> int:
        """Choices of started prompts that will decode here, and have no place in its batch yet."""
        return sum(job.num_places for job in self._started.values() if job.keep)

    @property
    def referenced_blocks(self) -> Iterator[int]:
        return (block for job in self._started.values() for block in job.blocks)

    def add(self, command: Prefill, *, keep: bool) -> None:
        job = PrefillJob(command, self._block_size, keep=keep)
        self._waiting[command.request_id] = job
        self._queue.join(job.ticket)

    def abort(self, request_id: int, draft: Draft) -> Gone | None:
        """Forget a waiting or chunked prompt now, a launched one when its step is collected."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            self._queue.leave(waiting.ticket)
            return _gone(waiting)
        if (started := self._started.get(request_id)) is None:
            return None
        if started.is_launched:
            started.is_aborted = True
            return None
        return self._drop(started, draft)

    def draft_alone(self, draft: Draft, *, free_blocks: int, free_places: int) -> bool:
        """Put the next step of prompts alone into the draft; False when none can run."""
        turns = self._queue.next_step(free_blocks=free_blocks, free_places=free_places)
        self._draft_turns(turns, draft)
        return bool(turns)

    def draft_chunks(
        self, draft: Draft, *, budget: int, free_blocks: int, free_places: int
    ) -> None:
        """Fill what decodes leave of a step's token budget with chunks of prompts."""
        turns = self._queue.next_chunks(
            budget=budget, free_blocks=free_blocks, free_places=free_places
        )
        self._draft_turns(turns, draft)

    def take_begun(self) -> Begun | None:
        """Whose turn has come with the draft, for the first time; to be told once."""
        begun, self._begun = tuple(self._begun), []
        return Begun(begun) if begun else None

    def launched(self, now_s: float) -> None:
        """The draft's rows have been launched: stages begin here."""
        for job in self._started.values():
            if job.is_launched and job.started_s is None:
                job.started_s = now_s

    def owns(self, sequence: int) -> bool:
        return sequence in self._started

    def collect_chunks(
        self, step_id: int, draft: Draft, *, started_s: float, ended_s: float
    ) -> list[Gone | Chunked]:
        """Chunks whose prompt goes on: they drew nothing, but may have been aborted meanwhile."""
        events: list[Gone | Chunked] = []
        for job in [j for j in self._started.values() if j.step_id == step_id and j.remaining]:
            job.step_id = None
            if job.is_aborted:
                events.append(self._drop(job, draft))
                continue
            request_id = job.command.request_id
            events.append(Chunked(request_id, job.num_in_step, started_s, ended_s))
            self._queue.rejoin(job.ticket)
        return events

    def collect(
        self, row: RowResult, ended_s: float, draft: Draft, adopt: Callable[..., None]
    ) -> Prefilled | Gone:
        """A prompt is done: hand it over, keep it (by `adopt`), or end it on its first token."""
        job = self._started[row.sequence]
        if job.is_aborted:
            return self._drop(job, draft)
        assert job.started_s is not None, "collected, but never launched"
        del self._started[row.sequence]
        draft.remove(row.sequence)
        finished = _finished(job, row)
        return Prefilled(
            request_id=job.command.request_id,
            token_ids=row.token_ids if job.command.sampling.max_tokens else (),
            finished=finished,
            handle=self._dispose(job, row, finished, adopt),
            started_s=job.started_s,
            ended_s=ended_s,
            logprobs=row.logprobs,
            prompt_logprobs=row.prompt_logprobs,
        )

    def release(self, request_id: int) -> None:
        """The last reader has ended; a second word of it changes nothing."""
        self._pool.end_hold(request_id)

    def _dispose(
        self,
        job: PrefillJob,
        row: RowResult,
        finished: tuple[FinishReason | None, ...],
        adopt: Callable[..., None],
    ) -> KVHandle | None:
        if all(finished):
            self._pool.release(job.blocks)
            return None
        if job.keep:
            adopt(job, row.token_ids, finished)
            return None
        self._pool.hold(job.command.request_id, job.blocks)
        return KVHandle(
            owner=self._owner.instance,
            epoch=self._owner.epoch,
            request_id=job.command.request_id,
            block_ids=job.blocks,
            num_tokens=job.num_tokens,
        )

    def _draft_turns(self, turns: Sequence[Turn[PrefillJob]], draft: Draft) -> None:
        for ticket, num_new in turns:
            job = ticket.subject
            if self._waiting.pop(job.command.request_id, None) is not None:
                self._start(job, draft)
            job.num_computed += num_new
            job.num_in_step = num_new
            job.step_id = draft.step_id
            draft.rows.append(Row(job.command.request_id, num_new, draws=job.remaining == 0))

    def _start(self, job: PrefillJob, draft: Draft) -> None:
        command = job.command
        job.blocks = self._pool.reserve(job.num_blocks)
        self._started[command.request_id] = job
        self._begun.append(command.request_id)
        sequence = NewSequence(
            sequence=command.request_id,
            choices=command.choices,
            prompt=command.prompt,
            output=command.output,
            num_computed=0,
            sampling=command.sampling,
            prompt_logprobs=command.prompt_logprobs,
        )
        draft.add(sequence, job.blocks[: blocks_for(job.num_tokens, self._block_size)])

    def _drop(self, job: PrefillJob, draft: Draft) -> Gone:
        del self._started[job.command.request_id]
        self._queue.leave(job.ticket)
        draft.remove(job.command.request_id)
        self._pool.release(job.blocks)
        return _gone(job)


def _gone(job: PrefillJob) -> Gone:
    return Gone(request_id=job.command.request_id, seq_ids=job.command.seq_ids)


def _finished(job: PrefillJob, row: RowResult) -> tuple[FinishReason | None, ...]:
    sampling, num_output = job.command.sampling, len(job.command.output) + 1
    if sampling.max_tokens == 0:
        return tuple(FinishReason.LENGTH for _ in row.token_ids)
    return tuple(finish_reason(token, sampling, num_output) for token in row.token_ids)
