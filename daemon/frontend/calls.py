"""From a checked body to a `Call`: the prompts as token ids, and all that is decided per request.

This is where limits that depend on the model are held: the vocabulary, the context, and how much
room a prompt leaves. Long texts are tokenised in a thread, after a look at their size.
"""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from daemon.errors import InvalidRequest, PromptTooLong
from daemon.frontend.schema import ChatBody, CommonBody, CompletionBody, Prompt
from daemon.frontend.served_model import ServedModel
from daemon.generation import GenerationSpec
from daemon.text import Tokenizer
from ipc.vocabulary import SamplingParams

MaxOutput = Callable[[int], int]
Result = TypeVar("Result")

MAX_SCORES = 1_000_000
_LONG_TEXT_CHARS = 2048  # about a millisecond of tokenising
_CHARS_PER_MESSAGE = 32  # what a template puts around one, about
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_LOWEST_TEMPERATURE = 1e-5


class Dialect(Enum):
    """Which of the two endpoints' shapes an answer takes."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, complete: what to generate, and how to tell it.

    `echoes` holds each prompt's text when it is to be repeated before the answer. `logprobs` is
    the number of alternatives per token, None for no log probabilities.
    """

    dialect: Dialect
    specs: tuple[GenerationSpec, ...]
    echoes: tuple[str, ...] | None = None
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_timing: bool = False
    return_token_ids: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(spec.prompt) for spec in self.specs)

    @property
    def num_choices(self) -> int:
        return sum(spec.num_choices for spec in self.specs)


async def plan_completion(body: CompletionBody, model: ServedModel, max_output: MaxOutput) -> Call:
    """What a completion request asks for; `max_output` tells the room beside a prompt.

    Raises:
        InvalidRequest: not with this model.
    """
    model.check_name(body.model)
    special = body.add_special_tokens is not False
    prompts = await _tokenise_all(body.prompts, model, special)
    echoes = None
    if body.echo:
        num_tokens = sum(map(len, prompts))
        echoes = await _aside_if_long(
            num_tokens, lambda: _echoes(body.prompts, prompts, model.tokenizer)
        )
    prompt_logprobs = body.logprobs if body.echo else None
    room = _told_within(max_output, body, len(prompts))
    specs = [_spec(body, prompt, model, room, prompt_logprobs) for prompt in prompts]
    if prompt_logprobs is not None:
        _check_scores(sum(map(len, prompts)) * body.num_choices * (1 + prompt_logprobs))
    return _call(Dialect.COMPLETION, body, specs, echoes)


async def plan_chat(body: ChatBody, model: ServedModel, max_output: MaxOutput) -> Call:
    """What a chat request asks for.

    Raises:
        InvalidRequest: not with this model.
    """
    model.check_name(body.model)
    try:
        prompt = await _chat_tokens(body, model)
        spec = _spec(body, prompt, model, _told_within(max_output, body, 1), None)
    except PromptTooLong as error:
        error.param = "messages"
        raise
    return _call(Dialect.CHAT, body, [spec], None)


async def _chat_tokens(body: ChatBody, model: ServedModel) -> list[int]:
    num_chars = sum(len(message.text) + len(message.name or "") for message in body.messages)
    num_chars += len(str(body.chat_template_kwargs or ""))
    _check_size(num_chars, model)
    num_chars += _CHARS_PER_MESSAGE * len(body.messages)
    prompt = await _aside_if_long(num_chars, lambda: _chat_prompt(body, model))
    if not prompt:
        raise InvalidRequest("The chat is empty for this model.", param="messages")
    return prompt


def _chat_prompt(body: ChatBody, model: ServedModel) -> list[int]:
    if model.chat_template is None:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    text = model.chat_template.render(
        [message.for_template for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        extra=body.chat_template_kwargs or {},
    )
    _check_size(len(text), model)
    return model.tokenizer.encode(text, special=bool(body.add_special_tokens))


async def _tokenise_all(
    prompts: Sequence[Prompt], model: ServedModel, special: bool
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_size(len(prompt), model)
        elif len(prompt) > model.max_context:
            raise PromptTooLong(num_prompt=len(prompt), num_output=1, limit=model.max_context)

    def tokenise() -> list[list[int]]:
        return [_tokenise(prompt, model.tokenizer, special) for prompt in prompts]

    return await _aside_if_long(sum(map(len, texts)), tokenise)


def _tokenise(prompt: Prompt, tokenizer: Tokenizer, special: bool) -> list[int]:
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt, special=special)
    else:
        token_ids = list(prompt)
        _check_vocabulary(token_ids, tokenizer, "prompt")
    return token_ids or _begin(tokenizer)


def _begin(tokenizer: Tokenizer) -> list[int]:
    """The prompt of an empty text."""
    if tokenizer.bos_id is None:
        raise InvalidRequest(
            "'prompt' is empty, and this model has no token to begin a text with.", param="prompt"
        )
    return [tokenizer.bos_id]


async def _aside_if_long(num_chars: int, work: Callable[[], Result]) -> Result:
    """Long texts must not hold up the streams of everybody else."""
    return await asyncio.to_thread(work) if num_chars > _LONG_TEXT_CHARS else work()


def _told_within(max_output: MaxOutput, body: CommonBody, num_prompts: int) -> MaxOutput:
    """The same room, or less where that many log probabilities would be told of it."""
    if body.num_logprobs is None:
        return max_output
    most = MAX_SCORES // (num_prompts * body.num_choices * (1 + body.num_logprobs))
    return lambda num_prompt: min(max_output(num_prompt), most)


def _check_scores(count: int) -> None:
    """One small request must not ask for an answer of gigabytes."""
    if count > MAX_SCORES:
        raise InvalidRequest(
            f"'echo' with 'logprobs' would answer with {count} log probabilities; "
            f"{MAX_SCORES} are the most. Ask for fewer prompts, choices or alternatives.",
            param="logprobs",
        )


def _check_size(num_chars: int, model: ServedModel) -> None:
    """Before anything is tokenised: a text of that size cannot fit, even in longest tokens."""
    at_least = num_chars // model.tokenizer.longest_token
    if at_least > model.max_context:
        raise PromptTooLong(num_prompt=at_least, num_output=1, limit=model.max_context)


def _check_vocabulary(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < tokenizer.num_token_ids:
        raise InvalidRequest(
            f"'{param}' holds a token id outside the vocabulary "
            f"(0 to {tokenizer.num_token_ids - 1}).",
            param=param,
        )


def _echoes(
    given: Sequence[Prompt], prompts: Sequence[list[int]], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """A text is repeated as it came, token ids as the text they make."""
    return tuple(
        text if isinstance(text, str) else "".join(tokenizer.prompt_pieces(token_ids))
        for text, token_ids in zip(given, prompts, strict=True)
    )


def _spec(
    body: CommonBody,
    prompt: list[int],
    model: ServedModel,
    max_output: MaxOutput,
    prompt_logprobs: int | None,
) -> GenerationSpec:
    room = max_output(len(prompt))
    wanted = body.requested_tokens
    return GenerationSpec(
        prompt=tuple(prompt),
        sampling=_sampling(body, model.tokenizer, room if wanted is None else min(wanted, room)),
        num_choices=body.num_choices,
        stop=body.stop_strings,
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(body: CommonBody, tokenizer: Tokenizer, max_tokens: int) -> SamplingParams:
    temperature = _given(body.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=random.getrandbits(63) if body.seed is None else body.seed & (2**63 - 1),
        min_tokens=min(body.min_tokens or 0, max_tokens),
        temperature=temperature if temperature >= _LOWEST_TEMPERATURE else 0.0,
        top_p=_given(body.top_p, 1.0),
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=_given(body.min_p, 0.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, tokenizer),
        logprobs=body.num_logprobs,
        end_token_ids=_end_token_ids(body, tokenizer),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: CommonBody, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    given = body.logit_bias or {}
    if not all(map(_TOKEN_ID.fullmatch, given)):
        raise InvalidRequest("'logit_bias' must have token ids as its keys.", param="logit_bias")
    biases = {int(key): bias for key, bias in given.items()}
    _check_vocabulary(list(biases), tokenizer, "logit_bias")
    return tuple(sorted(biases.items()))


def _end_token_ids(body: CommonBody, tokenizer: Tokenizer) -> tuple[int, ...]:
    own = body.stop_token_ids or []
    _check_vocabulary(own, tokenizer, "stop_token_ids")
    eos = () if body.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys([*eos, *own]))


def _call(
    dialect: Dialect,
    body: CommonBody,
    specs: Sequence[GenerationSpec],
    echoes: tuple[str, ...] | None,
) -> Call:
    options = body.stream_options
    return Call(
        dialect=dialect,
        specs=tuple(specs),
        echoes=echoes,
        logprobs=body.num_logprobs,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_timing=bool(body.return_timing),
        return_token_ids=bool(body.return_token_ids),
    )
