"""Server-sent events of one streamed completion: from timed pieces of bytes to an answer.

Pure. A reader keeps pieces as they come from the socket and makes sense of them when the answer
has ended, so that nothing but the clock stands between two tokens. An event counts from the
moment its last byte has come.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson

Piece = tuple[float, bytes]


class RequestFailed(Exception):
    """No answer to one request; `kind` is what failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class StageTimes(msgspec.Struct, frozen=True):
    """The five stages (arXiv 2401.09670, section 6.3) as the service tells them."""

    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float


@dataclass(frozen=True)
class Answer:
    """One complete answer.

    Args:
        event_s: when each event with tokens came, by the reader's clock; at least one.
        output_tokens: by the service's own count; without one, by events or token ids.
        input_tokens: by the service's own count; None when it tells none.
        stages: None when the service tells none.
    """

    event_s: tuple[float, ...]
    output_tokens: int
    is_counted: bool
    input_tokens: int | None = None
    stages: StageTimes | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: Any = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    timing: Any = None
    object: str | None = None
    message: str | None = None


def read_answer(pieces: Iterable[Piece]) -> Answer:
    """The answer that a finished stream holds.

    Raises:
        RequestFailed: it holds an error, nonsense, no token, or no end.
    """
    reader = _Reader()
    for time_s, payload in _payloads(pieces):
        if payload == b"[DONE]":
            reader.has_ended = True
        else:
            reader.take(time_s, payload)
    return reader.answer()


def error_message(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _one_line(body.decode(errors="replace"))
    return _told(content)


def _payloads(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The data of all events, each with the time at which it was complete."""
    rest = b""
    time_s = 0.0
    for time_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_s, line[5:].strip()
    if rest.startswith(b"data:"):
        yield time_s, rest[5:].strip()


class _Reader:
    """Counts tokens, and remembers when they came."""

    def __init__(self) -> None:
        self.has_ended = False
        self._event_s: list[float] = []
        self._num_tokens = 0
        self._empty_end_s: float | None = None
        self._usage = _Usage()
        self._stages: StageTimes | None = None

    def take(self, time_s: float, payload: bytes) -> None:
        event = _parse(payload)
        if event.error is not None or event.object == "error":
            raise RequestFailed("stream_error", _told(event.error or event.message))
        if event.choices:
            self._take_choice(time_s, event.choices[0])
        if event.usage is not None:
            self._usage = event.usage
        if event.timing is not None:
            self._stages = _stage_times(event.timing)

    def answer(self) -> Answer:
        if not self.has_ended:
            tokens = f"{self._num_tokens} tokens"
            raise RequestFailed("cut_short", f"the stream ended after {tokens}, without its end")
        counted = self._usage.completion_tokens
        if self._empty_end_s is not None and counted is not None and counted > self._num_tokens:
            self._event_s.append(self._empty_end_s)  # there was a token in it, without text
        if not self._event_s or counted == 0:
            raise RequestFailed("no_tokens", "the answer holds no token")
        return Answer(
            event_s=tuple(self._event_s),
            output_tokens=self._num_tokens if counted is None else counted,
            is_counted=counted is not None,
            input_tokens=self._usage.prompt_tokens,
            stages=self._stages,
        )

    def _take_choice(self, time_s: float, choice: _Choice) -> None:
        count = _num_tokens(choice)
        if count:
            self._event_s.append(time_s)
            self._num_tokens += count
        if choice.finish_reason is not None:
            self.has_ended = True
            self._empty_end_s = None if count else time_s


def _num_tokens(choice: _Choice) -> int:
    """By ids where there are some. Services send no empty event without cause: a token whose
    characters are not yet whole; but the one that tells the end may be empty."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    return 1 if choice.text or choice.finish_reason is None else 0


def _parse(payload: bytes) -> _Event:
    try:
        return msgspec.convert(orjson.loads(payload), _Event)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise RequestFailed("malformed", f"an event cannot be read: {error}") from error


def _stage_times(timing: Any) -> StageTimes | None:
    """Another service may mean something else by that name."""
    try:
        return msgspec.convert(timing, StageTimes)
    except msgspec.ValidationError:
        return None


def _told(content: Any) -> str:
    """The sentence inside an error, whatever it is wrapped in."""
    while isinstance(content, dict):
        content = content.get("error") or content.get("message") or content.get("detail") or ""
    return _one_line(str(content))


def _one_line(text: str) -> str:
    """What would move a terminal's cursor, or colour it, is left out."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(printable.split())[:200] or "no message"
