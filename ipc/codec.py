"""Messages to frames and back: a fixed header, a JSON payload, nothing else. No pickle.

A frame pair is `[header, payload]`. The header bears the protocol version, the kind of payload,
the sender's epoch, a sequence number and a checksum (a digit that changed would still be JSON). A
gap in the numbers means that something was lost and ends that epoch. The hot message, `Tokens`, is
a positional array picked by the kind byte; all others are tagged objects.
"""

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum

import msgspec
import orjson

from ipc.messages import PROTOCOL_VERSION, Command, Event, Tokens

_NUMBERED = struct.Struct("<BBQQ")
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<BBQQI")


class Kind(IntEnum):
    """What the payload is."""

    COMMAND = 1
    EVENT = 2
    TOKENS = 3


_KINDS = {kind.value: kind for kind in Kind}


class WireError(Exception):
    """Frames that are not of this protocol."""


class SequenceGap(WireError):
    """A message was lost or doubled: the sender's epoch is over."""


class Header(msgspec.Struct, frozen=True):
    """Who sent it (epoch), and as which of its messages (number)."""

    kind: Kind
    epoch: int
    number: int


class Numbering:
    """Counts one direction of one link; `check` refuses anything but the next number."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def check(self, number: int) -> None:
        if number != self._next:
            raise SequenceGap(f"message {number} came where {self._next} was due")
        self._next += 1


def encode(message: Command | Event | Tokens, kind: Kind, epoch: int, number: int) -> list[bytes]:
    """[header, payload] of one message."""
    payload = orjson.dumps(msgspec.to_builtins(message))
    numbered = _NUMBERED.pack(PROTOCOL_VERSION, kind, epoch, number)
    return [numbered + _CHECKSUM.pack(_checksum(numbered, payload)), payload]


def read_header(frames: Sequence[bytes]) -> Header:
    """Raises WireError when the frames are not `[header, payload]` of our version, or damaged."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise WireError(f"{len(frames)} frames where [header, payload] was due")
    version, kind, epoch, number, checksum = _HEADER.unpack(frames[0])
    if checksum != _checksum(frames[0][: _NUMBERED.size], frames[1]):
        raise WireError("the checksum of a message is not that of its content")
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol {version} where {PROTOCOL_VERSION} is spoken")
    if kind not in _KINDS:
        raise WireError(f"unknown kind of message {kind}")
    return Header(_KINDS[kind], epoch, number)


def read_command(payload: bytes) -> Command:
    return _convert(payload, Command)  # type: ignore[return-value, arg-type]


def read_event(kind: Kind, payload: bytes) -> Event | Tokens:
    return _convert(payload, Tokens if kind is Kind.TOKENS else Event)  # type: ignore[return-value, arg-type]


def _checksum(numbered: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(numbered))


def _convert(payload: bytes, into: type) -> object:
    try:
        return msgspec.convert(orjson.loads(payload), into)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise WireError(str(error)) from error
