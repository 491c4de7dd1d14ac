"""A leader's prompts: those that wait, those in the running step, those held for their readers."""

import bisect
from collections.abc import Callable, Iterator

import msgspec

from gpu_workers.batching import pack_prefill, prefill_chunk
from gpu_workers.block_pool import BlockPool
from gpu_workers.draft import Draft
from gpu_workers.sequences import PrefillJob, finish_reason
from gpu_workers.step_plan import NewSequence, Row, RowResult
from ipc.kv_layout import blocks_for
from ipc.messages import Gone, Prefill, Prefilled
from ipc.vocabulary import FinishReason, KVHandle


class Owner(msgspec.Struct, frozen=True):
    """Whose handles these are."""

    instance: str
    epoch: int


class PrefillSide:
    """First come, first served by arrival. Blocks are reserved when a prompt starts."""

    def __init__(
        self, owner: Owner, pool: BlockPool, *, block_size: int, prefill_tokens: int
    ) -> None:
        self._owner = owner
        self._pool = pool
        self._block_size = block_size
        self._prefill_tokens = prefill_tokens
        self._waiting: list[PrefillJob] = []
        self._started: dict[int, PrefillJob] = {}

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
        bisect.insort(self._waiting, job, key=lambda j: j.command.arrival)

    def abort(self, request_id: int, draft: Draft) -> Gone | None:
        """Forget a waiting or chunked prompt now, a launched one when its step is collected."""
        for index, job in enumerate(self._waiting):
            if job.command.request_id == request_id:
                del self._waiting[index]
                return _gone(job)
        if (started := self._started.get(request_id)) is None:
            return None
        if started.is_launched:
            started.is_aborted = True
            return None
        return self._drop(started, draft)

    def draft_whole(self, draft: Draft, *, free_blocks: int, free_places: int) -> bool:
        """Put the next batch of whole prompts into the draft; False when none can run."""
        unfinished = [job for job in self._started.values() if not job.is_launched]
        if not unfinished:  # else prompts that a chunked policy began: finish them first
            count = pack_prefill(
                (job.as_waiting for job in self._waiting),
                max_tokens=self._prefill_tokens,
                free_blocks=free_blocks,
                free_places=free_places,
            )
            unfinished = self._waiting[:count]
            del self._waiting[:count]
            for job in unfinished:
                self._start(job, draft)
        for job in unfinished:
            self._draft_row(job, job.remaining, draft)
        return bool(unfinished)

    def draft_chunks(
        self, draft: Draft, *, budget: int, free_blocks: int, free_places: int
    ) -> None:
        """Fill a step's token budget with chunks of prompts, oldest first."""
        for job in list(self._waiting):
            if sum(j.remaining for j in self._started.values()) >= budget:
                break
            if job.num_blocks > free_blocks or job.num_places > free_places:
                break
            free_blocks -= job.num_blocks
            free_places -= job.num_places
            self._start(job, draft)
            self._waiting.remove(job)
        jobs = [job for job in self._started.values() if not job.is_launched]
        for job, num_new in zip(
            jobs, prefill_chunk([j.remaining for j in jobs], budget=budget), strict=False
        ):
            self._draft_row(job, num_new, draft)

    def launched(self, now_s: float) -> None:
        """The draft's rows have been launched: stages begin here."""
        for job in self._started.values():
            if job.is_launched and job.started_s is None:
                job.started_s = now_s

    def owns(self, sequence: int) -> bool:
        return sequence in self._started

    def collect_chunks(self, step_id: int, draft: Draft) -> list[Gone]:
        """Chunks whose prompt goes on: they drew nothing, but may have been aborted meanwhile."""
        gone = []
        for job in [j for j in self._started.values() if j.step_id == step_id and j.remaining]:
            job.step_id = None
            if job.is_aborted:
                gone.append(self._drop(job, draft))
        return gone

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

    def _start(self, job: PrefillJob, draft: Draft) -> None:
        command = job.command
        job.blocks = self._pool.reserve(job.num_blocks)
        self._started[command.request_id] = job
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

    def _draft_row(self, job: PrefillJob, num_new: int, draft: Draft) -> None:
        job.num_computed += num_new
        job.step_id = draft.step_id
        draft.rows.append(Row(job.command.request_id, num_new, draws=job.remaining == 0))

    def _drop(self, job: PrefillJob, draft: Draft) -> Gone:
        del self._started[job.command.request_id]
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
