"""What a client asked for, and the stream of what it gets: the seam between front and controller.

`Submitter` is the controller's face towards the frontend. `submit` either refuses at once or
returns a `Generation`: iterate it for deltas, leave its `with` block to abort what is unfinished.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from daemon.errors import ServeError
from ipc.vocabulary import FinishReason, SamplingParams, TokenLogprobs


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it, checked and complete.

    `stop` strings end a choice when they appear in its text. `prompt_logprobs` asks for the log
    probabilities of the prompt's own tokens (echo), with that many alternatives each.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    prompt_logprobs: int | None = None


class Origin(msgspec.Struct, frozen=True):
    """What the client calls its call, and its W3C `traceparent`; empty where it says nothing."""

    label: str = ""
    traceparent: str = ""


NAMELESS = Origin()


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained: whole characters only; `finished` comes with its last delta.

    `choice` counts over all prompts of the call: prompt index x choices per prompt + choice.
    `logprobs` has one entry per token in `token_ids`, when asked for. `prompt_logprobs` comes
    once, with the first delta of a prompt's first choice; its first entry is None, since nothing
    precedes the first token.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finished: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class StageTimes(msgspec.Struct, frozen=True):
    """The paper's five stages of one request (section 6.3), in seconds; they add up to its life."""

    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float


class TokenStream:
    """Deltas on their way to one client. A put never waits: there is room for all that may come.

    The bound is the request's own: `max_tokens` per choice.
    """

    def __init__(self, num_choices: int) -> None:
        self._unfinished = num_choices
        self._pending: list[Delta] = []
        self._has_failed = False
        self._error: ServeError | None = None  # that nobody has been told of
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its last delta, or the stream has its error."""
        return self._unfinished == 0 or self._has_failed

    def put(self, delta: Delta) -> None:
        self._pending.append(delta)
        if delta.finished is not None:
            self._unfinished -= 1
        if self._waiter is not None:
            self._wake(self._waiter)

    def fail(self, error: ServeError) -> None:
        """End the stream by an error, after what is already in it. The first error counts."""
        if not self.is_finished:
            self._has_failed, self._error = True, error
            if self._waiter is not None:
                self._wake(self._waiter)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        """All deltas that have come since the last call; waits while there are none."""
        while not self._pending:
            if self._error is not None:
                raise self._take_error()
            if self.is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._pending = self._pending, []
        return deltas

    def _take_error(self) -> ServeError:
        """Told once. Kept here, it would hold the whole call in a circle: it knows the frames that
        it has passed, and they know this stream."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _wake(self, waiter: asyncio.Future[None]) -> None:
        """Once, however much comes before it runs."""
        self._waiter = None
        if not waiter.done():  # it was cancelled
            waiter.set_result(None)


class Generation(Protocol):
    """A client's call under way. Leaving the `with` block aborts whatever is unfinished."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __aiter__(self) -> "Generation": ...

    async def __anext__(self) -> list[Delta]: ...

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        """One per prompt, once it has finished."""
        ...


class Submitter(Protocol):
    """Takes checked calls."""

    def submit(self, specs: Sequence[GenerationSpec], origin: Origin = NAMELESS) -> Generation:
        """Start all prompts of one call, or none.

        Raises:
            ServeError: refused at the door, with nothing held: full, not ready, too long.
        """
        ...

    def max_output(self, num_prompt: int) -> int:
        """How many output tokens fit beside such a prompt: in the context and in every pool.

        Raises:
            PromptTooLong: not even one.
        """
        ...
