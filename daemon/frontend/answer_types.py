"""What answers look like, as types, for those who read the API's description.

Answers are built elsewhere, by hand and fast; tests hold what is built against these.
"""

from typing import Any, Literal

import msgspec

from daemon.generation import StageTimes
from ipc.vocabulary import FinishReason


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong, with what (`param`), and its name for programs (`code`)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every refusal and failure."""

    error: ErrorDetail


class CachedTokens(msgspec.Struct, frozen=True):
    """How many of a prompt's tokens were not computed anew."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens that were read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers, and all chunks of streamed ones, begin with."""

    id: str
    created: int
    model: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of every choice. `token_ids` are there when asked for."""

    index: int
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(Told, frozen=True, kw_only=True):
    """One text."""

    text: str


class Completion(Answer, frozen=True, kw_only=True):
    """`POST /v1/completions`, not streamed. `timing` is there when asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    timing: StageTimes | list[StageTimes] | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(Answer, frozen=True, kw_only=True):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timing: StageTimes | list[StageTimes] | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """The model's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Told, frozen=True, kw_only=True):
    """One message."""

    message: AssistantMessage


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`, not streamed. `timing` is there when asked for."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timing: StageTimes | list[StageTimes] | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(msgspec.Struct, frozen=True):
    """What a message gained; its role comes with its first text."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Told, frozen=True, kw_only=True):
    """What one choice gained."""

    delta: MessageDelta


class ChatCompletionChunk(Answer, frozen=True, kw_only=True):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timing: StageTimes | list[StageTimes] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """The served model; `max_model_len` is the longest prompt and answer together, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """All models, which is one."""

    object: Literal["list"]
    data: list[ModelCard]


class Status(msgspec.Struct, frozen=True):
    """`ready`, or `alive`."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """Of this software."""

    version: str
