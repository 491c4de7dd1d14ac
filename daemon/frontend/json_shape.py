"""How much there is in a JSON text, and how deep, before it is decoded.

Decoding takes time by the value and memory by the container, holds the interpreter all the while,
and so stops every stream; a thread does not help. What is inside strings is not counted: a text
may be as long as a body. Texts are looked at in slices, between which others get their turn.
"""

from collections.abc import Iterator

from daemon.errors import InvalidJson

MAX_DEPTH = 32
MAX_VALUES = 600_000  # 15 ms to decode; 64 prompts of 8,192 ids are fewer
MAX_PARTS = 60_000  # lists, objects and fields: 20 ms to decode
SLICE_BYTES = 64 * 1024


def check_shape(raw: bytes) -> None:
    """Refuse what holds too much. What is no JSON at all is left to the decoder.

    Raises:
        InvalidJson: too many values, lists, objects and fields, or too deep a nesting.
    """
    num_opened = raw.count(b"[") + raw.count(b"{")
    if (
        num_opened <= MAX_DEPTH
        and raw.count(b":") < MAX_PARTS // 2
        and raw.count(b",") < MAX_VALUES
    ):
        return  # nearly all bodies
    num_values, num_parts = 1, 0
    brackets = bytearray()
    for structure in _outside_strings(raw):
        found = structure.translate(_AS_SQUARE, _ALL_BUT_BRACKETS)
        num_values += structure.count(b",")
        num_parts += found.count(b"[") + structure.count(b":")
        _check_count(num_values, num_parts)
        brackets += found
    _check_depth(bytes(brackets))


def _check_count(num_values: int, num_parts: int) -> None:
    if num_values > MAX_VALUES or num_parts > MAX_PARTS:
        raise InvalidJson(
            f"The body holds more than {MAX_VALUES} values, or {MAX_PARTS} lists, objects and "
            "fields."
        )


def _check_depth(brackets: bytes) -> None:
    """Each round takes the innermost pairs away."""
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise InvalidJson(f"The body is not valid JSON, or nested deeper than {MAX_DEPTH} levels.")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """All but the strings, slice by slice."""
    is_inside, start = False, 0
    while start < len(raw):
        end = _end_of_slice(raw, start)
        # A run of backslashes begins an escape, so pairs of them are escapes of themselves.
        piece = raw[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b" ".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        start = end


def _end_of_slice(raw: bytes, start: int) -> int:
    """Never between a backslash and what it escapes."""
    end = start + SLICE_BYTES
    piece = raw[start:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end + num_backslashes % 2


_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
