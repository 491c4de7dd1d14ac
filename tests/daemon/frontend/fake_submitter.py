"""A submitter with the real face and no engine behind it.

By default it replies like a model that says `reply` to every prompt; a test may give a script
instead: deltas to hand out, errors to raise and events to wait for, in that order.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from daemon.errors import PromptTooLong, ServeError
from daemon.generation import NAMELESS, Delta, GenerationSpec, Origin, StageTimes
from daemon.text import ChoiceText, Tokenizer
from ipc.vocabulary import FinishReason, TokenLogprobs

Step = list[Delta] | Exception | asyncio.Event
Script = Callable[[Sequence[GenerationSpec]], list[Step]]

STAGES = StageTimes(
    prefill_queue_s=0.1, prefill_s=0.2, transfer_s=0.3, decode_queue_s=0.4, decode_s=0.5
)


class FakeGeneration:
    """Hands out the steps of a script, one per call; remembers how it was left."""

    def __init__(self, specs: Sequence[GenerationSpec], steps: list[Step]) -> None:
        self.specs = specs
        self.left = asyncio.Event()
        self.is_aborted = False
        self._steps = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_aborted = bool(self._steps)
        self.left.set()

    def __aiter__(self) -> "FakeGeneration":
        return self

    async def __anext__(self) -> list[Delta]:
        while self._steps:
            step = self._steps[0]
            if isinstance(step, asyncio.Event):
                await step.wait()
            self._steps.pop(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, list):
                return step
        raise StopAsyncIteration

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        return (STAGES,) * len(self.specs)


class FakeSubmitter:
    """Takes calls and remembers them."""

    def __init__(self, tokenizer: Tokenizer, *, reply: str = "", context: int = 256) -> None:
        self.tokenizer = tokenizer
        self.reply = reply
        self.context = context
        self.script: Script | None = None
        self.refusal: Exception | None = None
        self.generations: list[FakeGeneration] = []
        self.origins: list[Origin] = []
        self.submitted = asyncio.Event()

    @property
    def last(self) -> FakeGeneration:
        return self.generations[-1]

    def submit(self, specs: Sequence[GenerationSpec], origin: Origin = NAMELESS) -> FakeGeneration:
        self.origins.append(origin)
        if self.refusal is not None:
            raise self.refusal
        steps = self._answer(specs) if self.script is None else self.script(specs)
        self.generations.append(FakeGeneration(specs, steps))
        self.submitted.set()
        return self.last

    def max_output(self, num_prompt: int) -> int:
        if num_prompt >= self.context:
            raise PromptTooLong(num_prompt=num_prompt, num_output=1, limit=self.context)
        return self.context - num_prompt

    def _answer(self, specs: Sequence[GenerationSpec]) -> list[Step]:
        """All choices, token by token, as the engine deals them: one delta per choice and step."""
        choices = [
            self._choice(spec, index * spec.num_choices + choice, is_first=choice == 0)
            for index, spec in enumerate(specs)
            for choice in range(spec.num_choices)
        ]
        num_steps = max(map(len, choices))
        return [[deltas[k] for deltas in choices if k < len(deltas)] for k in range(num_steps)]

    def _choice(self, spec: GenerationSpec, choice: int, *, is_first: bool) -> list[Delta]:
        prompt_logprobs = _prompt_logprobs(spec) if is_first else None
        text = ChoiceText(self.tokenizer, spec.stop)
        token_ids = [*self.tokenizer.encode(self.reply, special=False), *self.tokenizer.eos_ids]
        deltas: list[Delta] = []
        for token_id in token_ids[: spec.sampling.max_tokens]:
            is_end = token_id in spec.sampling.end_token_ids
            piece, stopped = ("", False) if is_end else text.push((token_id,))
            is_last = len(deltas) + 1 == min(spec.sampling.max_tokens, len(token_ids))
            finished = _finish(is_stopped=is_end or stopped, is_last=is_last)
            piece += text.flush() if finished and not stopped else ""
            deltas.append(_delta(spec, choice, piece, (token_id,), finished))
            if finished:
                break
        if not deltas:
            deltas = [_delta(spec, choice, "", (), FinishReason.LENGTH)]
        first = deltas[0]
        deltas[0] = Delta(
            choice, first.text, first.token_ids, first.logprobs, first.finished, prompt_logprobs
        )
        return deltas


def _finish(*, is_stopped: bool, is_last: bool) -> FinishReason | None:
    if is_stopped:
        return FinishReason.STOP
    return FinishReason.LENGTH if is_last else None


def _delta(
    spec: GenerationSpec,
    choice: int,
    text: str,
    token_ids: tuple[int, ...],
    finished: FinishReason | None,
) -> Delta:
    logprobs = None
    if spec.sampling.logprobs is not None:
        logprobs = tuple(_entry(token_id, spec.sampling.logprobs) for token_id in token_ids)
    return Delta(choice, text, token_ids, logprobs, finished)


def _entry(token_id: int, num_top: int) -> TokenLogprobs:
    """The token itself is the likeliest; the others follow by number."""
    top = tuple((token_id + k, -0.5 - k) for k in range(num_top))
    return TokenLogprobs(token_id, -0.5, top)


def _prompt_logprobs(spec: GenerationSpec) -> tuple[TokenLogprobs | None, ...] | None:
    if spec.prompt_logprobs is None:
        return None
    num_top = spec.prompt_logprobs
    return (None, *(_entry(token_id, num_top) for token_id in spec.prompt[1:]))


def failing(error: ServeError, *before: list[Delta]) -> Script:
    """A script that hands out some deltas and then fails."""
    return lambda _: [*before, error]
