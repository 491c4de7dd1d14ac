"""What two daemons say to each other over the link between their nodes, as declared types.

The home of an instance, the node of its stage 0, calls; the node that hosts other segments of it
answers. A frame pair is `[header, JSON]`; the header bears the session and a number in it. A gap
in the numbers means that something was lost, and ends the session.
"""

import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import orjson

from ipc.channel import PoolDescriptor
from ipc.codec import Numbering, WireError
from ipc.messages import Broken, Exit, Hello, Loading, PeerUp, Ready, Released, WorkerConfig
from ipc.vocabulary import WorkerName

LINK_VERSION = 1
MAX_LINK_MESSAGE_BYTES = 1 << 20

_HEADER = struct.Struct("<QQ")
M = TypeVar("M")


# ---- home -> host ---------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of a session; what an earlier one of the same home left is ended.

    `placement` and `model` are digests: both sides must mean the same ones. `silence_s` is how
    long home may be silent before its segments are killed.
    """

    version: int
    home: str
    silence_s: float
    placement: str
    model: str


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Start a worker; what depends on the machine (paths, cores) is the host's to fill in."""

    config: WorkerConfig


class Kill(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL. Answered by `Ended` when it is reaped."""

    worker: WorkerName
    epoch: int


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Give a worker the descriptor of a pool of this node; the `PeerUp` follows."""

    worker: WorkerName
    epoch: int
    pool: PoolDescriptor


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Pass a command on."""

    worker: WorkerName
    epoch: int
    command: PeerUp | Exit


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Ping`, with its time: until then, home was there."""

    sent_s: float


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Home stops: the session is over."""


Order = Spawn | Kill | Lend | Tell | Pong | Leave
FromHome = Join | Order


# ---- host -> home ---------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The session stands."""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """There will be no session, for a reason that people have to see to."""

    reason: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker's process exists."""

    worker: WorkerName
    epoch: int
    pid: int


class Said(msgspec.Struct, frozen=True, tag=True):
    """What a starting worker said. Of a `Ready` one, the host has taken the pool's descriptor."""

    worker: WorkerName
    epoch: int
    event: Hello | Loading | Broken | Ready | Released


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker is reaped, or could not be started."""

    worker: WorkerName
    epoch: int
    how: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """The host is there; `sent_s` is by its own clock."""

    sent_s: float


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """The session is over, or unknown; nothing of it lives here any more."""

    reason: str


FromHost = Joined | Rejected | Started | Said | Ended | Ping | Evicted


# ---- frames ---------------------------------------------------------------------------------


class Session:
    """One numbered stream each way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._sent, self._received = Numbering(), Numbering()

    def pack(self, message: FromHome | FromHost) -> list[bytes]:
        header = _HEADER.pack(self.number, self._sent.take())
        return [header, orjson.dumps(msgspec.to_builtins(message))]

    def check(self, frames: Sequence[bytes]) -> None:
        """Raises SequenceGap."""
        self._received.check(_header(frames)[1])


def session_of(frames: Sequence[bytes]) -> int:
    """Raises WireError."""
    return _header(frames)[0]


def from_home(frames: Sequence[bytes]) -> FromHome:
    """Raises WireError."""
    return _convert(frames[1], FromHome)  # type: ignore[arg-type]


def from_host(frames: Sequence[bytes]) -> FromHost:
    """Raises WireError."""
    return _convert(frames[1], FromHost)  # type: ignore[arg-type]


def _header(frames: Sequence[bytes]) -> tuple[int, int]:
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise WireError(f"{len(frames)} frames where [header, payload] was due")
    session, number = _HEADER.unpack(frames[0])
    return session, number


def _convert(payload: bytes, into: type[M]) -> M:
    try:
        return msgspec.convert(orjson.loads(payload), into)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise WireError(str(error)) from error
