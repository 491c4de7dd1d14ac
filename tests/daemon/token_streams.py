"""Drive a tokenizer as a stream does, one token at a time."""

from daemon.text import ChoiceText, Tokenizer
from tests.daemon.small_tokenizers import (
    byte_level,
)

CHINESE_AND_EMOJI = "你好，世界！🎉 Party 👩‍👩‍👧 naïve"  # noqa: RUF001


def stream(tokenizer: Tokenizer, token_ids: list[int], *stop: str) -> list[str]:
    """What a client gets of each token, and what is left at the end."""
    text = ChoiceText(tokenizer, stop)
    return [text.push((token_id,))[0] for token_id in token_ids] + [text.flush()]


def id_of(token: str) -> int:
    """The id of one of the byte-level tokenizer's tokens."""
    return byte_level().get_vocab()[token]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token per byte, whatever the bytes are."""
    by_bytes = {tokenizer.token_bytes(k): k for k in reversed(range(tokenizer.num_token_ids))}
    return [by_bytes[bytes([byte])] for byte in raw]
