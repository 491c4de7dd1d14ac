"""The two request bodies, checked once: types, ranges, and what is known but not offered.

Fields that nobody here knows are ignored, as the API's clients add new ones all the time; null
means "not given" everywhere. Nothing here needs the model; what does is in
`daemon.frontend.calls`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
import orjson
from msgspec import Meta

from daemon.errors import InvalidJson, InvalidRequest, UnsupportedParameter
from daemon.frontend.quoting import quoted
from daemon.frontend.unknown_fields import UnknownFields
from daemon.frontend.unsupported import refuse_unsupported, unheard_of

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
DEFAULT_COMPLETION_TOKENS = 16

Prompt = str | Sequence[int]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
BodyType = TypeVar("BodyType", bound="CommonBody")


class StreamOptions(msgspec.Struct, frozen=True):
    """Whether a stream tells the usage: in one last chunk, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class IgnoredFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every client may say of itself and of its request; nothing here depends on it."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None


class CommonBody(IgnoredFields, frozen=True, kw_only=True):
    """What completions and chats have in common; None always means "not given".

    `elsewhere` are fields that only the other endpoint has, with the values that change nothing.
    """

    elsewhere: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stop: str | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_timing: bool | None = None
    return_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Without empty ones, which would stop nothing."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(string for string in stop if string)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are asked for per token; None for no log probabilities."""
        raise NotImplementedError

    @property
    def requested_tokens(self) -> int | None:
        """The longest answer that the client wants; None for whatever fits.

        Of the two names of this length the newer one counts, on both endpoints.
        """
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def check(self) -> None:
        """What concerns several fields at once.

        Raises:
            InvalidRequest: they do not go together.
        """
        if isinstance(self.stop, str) and len(self.stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"'stop' must have at most {MAX_STOP_CHARS} characters.", param="stop"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )
        wanted = self.requested_tokens
        if wanted is not None and (self.min_tokens or 0) > wanted:
            raise InvalidRequest(
                f"'min_tokens' must not be larger than 'max_tokens' ({wanted}).", param="min_tokens"
            )
        if self.best_of not in (None, self.num_choices):
            raise UnsupportedParameter("'best_of' must be equal to 'n'.", param="best_of")


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    elsewhere = {"messages": (), "top_logprobs": (0,)}

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def requested_tokens(self) -> int | None:
        wanted = super().requested_tokens
        return DEFAULT_COMPLETION_TOKENS if wanted is None else wanted

    @property
    def prompts(self) -> list[Prompt]:
        """One or several prompts, each text or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):  # `check` has seen that all are of one kind
            return [cast("list[int]", given)]
        return cast("list[Prompt]", given)

    def check(self) -> None:
        """As `CommonBody.check`, and the prompts."""
        super().check()
        _check_prompts(self.prompt)
        if self.requested_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "'max_tokens' must be at least 1 unless 'echo' is true.", param="max_tokens"
            )


class TextPart(msgspec.Struct, frozen=True):
    """A piece of a message's content; text is the only kind that a text model reads."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_PARTS)]
    name: str | None = None

    @property
    def for_template(self) -> dict[str, str]:
        """As chat templates know it: `developer` is the new name of `system`."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.text}
        return message if self.name is None else message | {"name": self.name}

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    elsewhere = {"prompt": (), "echo": (False,)}

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """As `CommonBody.check`, and what only chats have."""
        super().check()
        if self.max_tokens == 0:
            raise InvalidRequest("'max_tokens' must be at least 1.", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
            )


def read_body(raw: bytes, kind: type[BodyType], unknown: UnknownFields | None = None) -> BodyType:
    """A request body as a typed value. How much it holds has been looked at before.

    Args:
        unknown: is told of its fields that nobody here knows.

    Raises:
        InvalidRequest: it is no JSON, has a wrong field, or asks for what is not offered.
    """
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"The body is not valid JSON: {error}.") from error
    if isinstance(content, dict):
        refuse_unsupported(content, kind.elsewhere)
    try:
        body = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    body.check()
    if unknown is not None and isinstance(content, dict):
        unknown.came(unheard_of(content, body, kind.elsewhere))
    return body


def _check_prompts(given: str | list[str | int | list[int]]) -> None:
    if isinstance(given, str):
        return
    kinds = {type(part) for part in given}
    if len(kinds) != 1:
        problem = "must not be an empty list" if not kinds else "must not mix text and token ids"
        raise InvalidRequest(f"'prompt' {problem}.", param="prompt")
    if int not in kinds and len(given) > MAX_PROMPTS:
        raise InvalidRequest(
            f"'prompt' must hold at most {MAX_PROMPTS} prompts, got {len(given)}.", param="prompt"
        )


_AT_PATH = re.compile(r"^(?P<problem>.*) - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*)`$")


def _explain(text: str) -> InvalidRequest:
    """msgspec's sentence, turned around: the field first."""
    located = _AT_PATH.match(text)
    problem, path = (located["problem"], located["path"]) if located else (text, "")
    path = path.replace("[...]", "")  # the keys of an object have no path of their own
    if missing := _MISSING_FIELD.match(problem):
        path = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequest(f"'{path}' is required.", param=path)
    problem = problem[:1].lower() + problem[1:].replace("`", "").replace(" | null", "")
    problem = problem.replace("int, got float", "a whole number of at most 64 bits")
    where = f"'{path}'" if path else "The body"
    return InvalidRequest(f"{where} is invalid: {quoted(problem, 200)}.", param=path or None)
