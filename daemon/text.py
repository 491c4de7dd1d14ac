"""Text to token ids, and token ids back to text as they come.

A `Tokenizer` knows what each token adds to a text as bytes, so a stream costs one lookup per
token and never decodes the same token twice. A `ChoiceText` joins those bytes to whole
characters and cuts the text exactly before a stop string. Where the files are and how they are
read is `daemon.tokenizer_files`' business.
"""

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from daemon.stop_strings import StopMatcher
from daemon.tokenizer_files import TokenIds, load_library, load_token_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer: safe to call from any thread.

    `longest_token` is the most characters that one token can stand for.
    """

    def __init__(self, library: tokenizers.Tokenizer, ids: TokenIds) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._bytes = TokenBytes(library)
        self.bos_id = ids.bos
        self.eos_ids = ids.eos
        self.num_token_ids = ids.num_token_ids
        self.longest_token = max(map(len, library.get_vocab()), default=1)
        self._prepends_bos = ids.prepend_bos and not self._adds_bos()

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Load a model directory's tokenizer.

        Raises:
            ConfigError: no files of a tokenizer, or broken ones.
        """
        library = load_library(directory)
        return cls(library, load_token_ids(directory, library))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the model wants around it (often a BOS)."""
        # The fast batch form computes no offsets and holds the interpreter lock least.
        ids = self._library.encode_batch_fast([text], add_special_tokens=special)[0].ids
        if special and self._prepends_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence."""
        return self._library.decode(list(token_ids), skip_special_tokens=skip_special)

    @property
    def token_text_bytes(self) -> "TokenBytes":
        """What each token adds to a text that has already begun; special tokens add nothing."""
        return self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The token itself: as in a text, but special tokens by their name."""
        return self._bytes.special.get(token_id) or self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        r"""The token as a string; `bytes:\xe4\xbd` for one that is no whole character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def prompt_pieces(self, prompt: Sequence[int]) -> list[str]:
        """What each token of a prompt adds to its echo: all but a leading BOS, whole characters.

        A character made by several tokens belongs to the last of them.
        """
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        skip = 1 if prompt and prompt[0] == self.bos_id else 0
        raw = [b""] * skip + [self.token_bytes(token_id) for token_id in prompt[skip:]]
        if len(prompt) > skip:
            raw[skip] = self._first_bytes(prompt[skip])
        pieces = [decode(piece) for piece in raw]
        pieces[-1:] = [piece + decode(b"", True) for piece in pieces[-1:]]
        return pieces

    def _first_bytes(self, token_id: int) -> bytes:
        """SentencePiece-like decoders drop the space before a text's first word."""
        raw = self.token_bytes(token_id)
        start = self.decode([token_id], skip_special=False).encode()
        return start if b" " + start == raw else raw

    def _adds_bos(self) -> bool:
        return self.bos_id is not None and self.bos_id in self._library.encode("").ids


class TokenBytes(dict[int, bytes]):
    """What each token adds to a text, found out at first use and then remembered."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._library = library
        kinds = _decoder_kinds(library)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        anchor = library.encode("a", add_special_tokens=False).ids
        self._anchor = anchor[-1:]
        self._anchor_text = library.decode(self._anchor)
        self.special = {
            token_id: token.content.encode()
            for token_id, token in library.get_added_tokens_decoder().items()
            if token.special
        }
        self.update(dict.fromkeys(self.special, b""))

    def __missing__(self, token_id: int) -> bytes:
        raw = self[token_id] = self._find_out(token_id)
        return raw

    def _find_out(self, token_id: int) -> bytes:
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self._after_anchor(token_id).encode()

    def _after_anchor(self, token_id: int) -> str:
        """Decode behind a known token: alone, it would lose the space of a word's start."""
        text = self._library.decode([*self._anchor, token_id], skip_special_tokens=False)
        if self._anchor_text and text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._library.decode([token_id], skip_special_tokens=False)


class ChoiceText:
    """The text of one choice, token by token: whole characters only, cut before a stop string.

    The text is taken as the continuation of a prompt: the space before its first word stays.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._bytes_of = tokenizer.token_text_bytes.__getitem__
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stop = StopMatcher(tuple(stop)) if stop else None

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """The text that has become certain, and whether a stop string ended the choice."""
        text = self._decode(b"".join(map(self._bytes_of, token_ids)))
        if self._stop is None:
            return text, False
        return self._stop.push(text)

    def flush(self) -> str:
        """What was held back, now that nothing follows; broken characters become U+FFFD."""
        text = self._decode(b"", True)
        if self._stop is None:
            return text
        text, stopped = self._stop.push(text)
        return text if stopped else text + self._stop.flush()


def _byte_level_bytes(token: str) -> bytes:
    """Byte-level vocabularies spell each byte as one printable character."""
    if all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The spelling of GPT-2: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def _decoder_kinds(library: tokenizers.Tokenizer) -> set[str]:
    """The names of all decoders in the chain."""
    if library.decoder is None:
        return set()
    state = json.loads(library.decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", [])]}
