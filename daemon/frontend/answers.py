"""Answers in the API's words: the whole one, and the server-sent events of a streamed one.

Pure: deltas in, bytes out. What is constant in a stream's chunks is built once per answer, so a
plain token costs the encoding of its own text and one concatenation.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from daemon.errors import ServeError
from daemon.frontend.calls import Call, Dialect
from daemon.frontend.logprobs import LogprobsPiece, LogprobsTeller, joined
from daemon.frontend.served_model import ServedModel
from daemon.generation import Delta, StageTimes
from ipc.vocabulary import FinishReason

DONE = b"data: [DONE]\n\n"


class Answer:
    """What both kinds of answer know: their head, and what has been counted."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        self.call = call
        self.num_output_tokens = 0
        self._id = f"{call.dialect.value}-{uuid.uuid4().hex}"
        self._model_id = model.id
        self._created = int(time.time())
        self._logprobs = LogprobsTeller(call, model.tokenizer)

    def head(self, kind: str) -> dict[str, str | int]:
        """The first fields of every object that belongs to this answer."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_id,
        }

    @property
    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        num_prompt = self.call.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": num_prompt + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def echo_of(self, choice: int) -> str:
        """What is repeated before a choice's own text."""
        if self.call.echoes is None:
            return ""
        return self.call.echoes[choice // self.call.specs[0].num_choices]


class WholeAnswer(Answer):
    """Collects all deltas into one body."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        super().__init__(call, model)
        self._choices = [
            _WholeChoice(self.echo_of(index), call.return_token_ids)
            for index in range(call.num_choices)
        ]

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.num_output_tokens += len(delta.token_ids)
            self._choices[delta.choice].take(delta, self._logprobs.tell(delta))

    def body(self, stage_times: Sequence[StageTimes]) -> bytes:
        """The response's body, when every choice has finished."""
        is_chat = self.call.dialect is Dialect.CHAT
        content = self.head("chat.completion" if is_chat else "text_completion") | {
            "choices": [
                choice.as_chat(index) if is_chat else choice.as_completion(index)
                for index, choice in enumerate(self._choices)
            ],
            "usage": self.usage,
        }
        if self.call.return_timing:
            content["timing"] = timing(stage_times)
        return orjson.dumps(content)


class StreamedAnswer(Answer):
    """Turns deltas into events as they come."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        super().__init__(call, model)
        self._shape = _SHAPES[call.dialect]
        self._head = orjson.dumps(self.head(self._shape.kind))[:-1]
        before_index = b"data: " + self._head + b',"choices":[{"index":'
        self._starts = [before_index + b"%d," % index for index in range(call.num_choices)]
        self._plain_starts = [start + self._shape.open for start in self._starts]
        self._has_begun = [False] * call.num_choices
        self._end = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"
        self._plain_end = self._shape.close + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._is_plain = not (
            call.logprobs is not None or call.continuous_usage or call.return_token_ids
        )

    def take(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas; nothing for tokens whose text is still held back."""
        return b"".join([self._event(delta) for delta in deltas])

    def ending(self, stage_times: Sequence[StageTimes]) -> bytes:
        """The end of the stream: a last chunk with usage and timing if asked for, and the mark."""
        last: dict[str, Any] = {"choices": []}
        if self.call.include_usage:
            last["usage"] = self.usage
        if self.call.return_timing:
            last["timing"] = timing(stage_times)
        if len(last) == 1:
            return DONE
        return b"data: " + orjson.dumps(self.head(self._shape.kind) | last) + b"\n\n" + DONE

    def _event(self, delta: Delta) -> bytes:
        self.num_output_tokens += len(delta.token_ids)
        if self._is_plain and delta.finished is None and self._has_begun[delta.choice]:
            if not delta.text:
                return b""
            return self._plain_starts[delta.choice] + orjson.dumps(delta.text) + self._plain_end
        return self._full_event(delta)

    def _full_event(self, delta: Delta) -> bytes:
        is_first = not self._has_begun[delta.choice]
        text = self.echo_of(delta.choice) + delta.text if is_first else delta.text
        logprobs = self._logprobs.tell(delta)
        is_silent = logprobs is None and not self.call.return_token_ids
        if not text and is_silent and delta.finished is None:
            return b""
        self._has_begun[delta.choice] = True
        return b"".join(
            (
                self._starts[delta.choice],
                self._shape.content(text, is_first),
                b',"logprobs":',
                orjson.dumps(logprobs),
                b',"finish_reason":',
                orjson.dumps(delta.finished),
                self._token_ids(delta),
                b"}]",
                self._running_usage() if self.call.continuous_usage else self._end,
            )
        )

    def _token_ids(self, delta: Delta) -> bytes:
        if not self.call.return_token_ids:
            return b""
        return b',"token_ids":' + orjson.dumps(delta.token_ids)

    def _running_usage(self) -> bytes:
        return b',"usage":' + orjson.dumps(self.usage) + b"}\n\n"


def error_event(error: ServeError) -> bytes:
    """How a stream that has begun ends without its answer."""
    return b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE


def timing(stage_times: Sequence[StageTimes]) -> Any:
    """The five stages in seconds: an object for one prompt, a list of them for several."""
    stages = msgspec.to_builtins(stage_times)
    return stages[0] if len(stages) == 1 else stages


class _WholeChoice:
    def __init__(self, echo: str, tells_token_ids: bool) -> None:
        self._texts = [echo]
        self._token_ids: list[int] | None = [] if tells_token_ids else None
        self._logprobs: LogprobsPiece | None = None
        self._finished: FinishReason | None = None

    def take(self, delta: Delta, logprobs: LogprobsPiece | None) -> None:
        self._texts.append(delta.text)
        if self._token_ids is not None:
            self._token_ids += delta.token_ids
        self._logprobs = joined(self._logprobs, logprobs)
        self._finished = delta.finished

    def as_completion(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "".join(self._texts)} | self._ending()

    def as_chat(self, index: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        return {"index": index, "message": message} | self._ending()

    def _ending(self) -> dict[str, Any]:
        ending = {"logprobs": self._logprobs, "finish_reason": self._finished}
        return ending if self._token_ids is None else ending | {"token_ids": self._token_ids}


class _ChunkShape(msgspec.Struct, frozen=True):
    """How a dialect wraps the text of one chunk; `first` opens a choice's first chunk."""

    kind: str
    first: bytes
    open: bytes
    close: bytes
    empty: bytes

    def content(self, text: str, is_first: bool) -> bytes:
        if not text and not is_first:
            return self.empty
        return (self.first if is_first else self.open) + orjson.dumps(text) + self.close


_SHAPES = {
    Dialect.COMPLETION: _ChunkShape(
        kind="text_completion", first=b'"text":', open=b'"text":', close=b"", empty=b'"text":""'
    ),
    Dialect.CHAT: _ChunkShape(
        kind="chat.completion.chunk",
        first=b'"delta":{"role":"assistant","content":',
        open=b'"delta":{"content":',
        close=b"}",
        empty=b'"delta":{}',
    ),
}
