"""Log probabilities in the two shapes of the API, piece by piece as the deltas come.

Completions list token strings with offsets into the text, and with `echo` the prompt's tokens
first; chats list objects that carry the tokens' bytes. Pieces of one choice concatenate.
"""

import codecs
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from daemon.frontend.calls import Call, Dialect
from daemon.generation import Delta
from daemon.text import Tokenizer
from ipc.vocabulary import TokenLogprobs

LogprobsPiece = dict[str, list[Any]]

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class LogprobsTeller:
    """Tells the log probabilities of all choices of one call."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._offsets: dict[int, _TextOffsets] = {}
        self._prompt_entries: dict[int, Sequence[TokenLogprobs | None]] = {}

    def tell(self, delta: Delta) -> LogprobsPiece | None:
        """What the answer says of this delta's tokens; None when nobody asked."""
        if self._call.logprobs is None:
            return None
        if self._call.dialect is Dialect.CHAT:
            return {
                "content": [_chat_entry(each, self._tokenizer) for each in delta.logprobs or ()]
            }
        piece = self._first_piece(delta) if delta.choice not in self._offsets else None
        offsets = self._offsets[delta.choice].advance(delta.token_ids)
        own = _completion_piece(delta.token_ids, delta.logprobs or (), offsets, self._tokenizer)
        return joined(piece, own)

    def _first_piece(self, delta: Delta) -> LogprobsPiece | None:
        """The echoed prompt's entries; offsets of the answer start behind its text."""
        prompt_index = delta.choice // self._call.specs[0].num_choices
        echo = "" if self._call.echoes is None else self._call.echoes[prompt_index]
        self._offsets[delta.choice] = _TextOffsets(self._tokenizer, len(echo))
        if delta.prompt_logprobs is not None:
            self._prompt_entries[prompt_index] = delta.prompt_logprobs
        entries = self._prompt_entries.get(prompt_index)
        if self._call.echoes is None or entries is None:
            return None
        prompt = self._call.specs[prompt_index].prompt
        lengths = map(len, self._tokenizer.prompt_pieces(prompt))
        offsets = list(accumulate(lengths, initial=0))[:-1]
        return _completion_piece(prompt, entries, offsets, self._tokenizer)


def joined(first: LogprobsPiece | None, second: LogprobsPiece | None) -> LogprobsPiece | None:
    """Two pieces of one choice as one: the first, which grows."""
    if first is None or second is None:
        return first or second
    for name, values in second.items():
        first[name].extend(values)
    return first


class _TextOffsets:
    """Where each token's text begins in its choice, counted in characters."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._bytes = tokenizer.token_text_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._next = start

    def advance(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._decode(self._bytes[token_id]))
        return offsets


def _completion_piece(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: list[int],
    tokenizer: Tokenizer,
) -> LogprobsPiece:
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [None if each is None else _finite(each.logprob) for each in entries],
        "top_logprobs": [
            None if each is None else _top_by_text(each, tokenizer) for each in entries
        ],
        "text_offset": offsets,
    }


def _top_by_text(entry: TokenLogprobs, tokenizer: Tokenizer) -> Mapping[str, float]:
    """The likeliest tokens and the drawn one; of equal strings the likelier counts."""
    by_text: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return by_text


def _chat_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_named(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
    return _named(entry.token_id, entry.logprob, tokenizer) | {"top_logprobs": top}


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
