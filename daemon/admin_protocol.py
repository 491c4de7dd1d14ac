"""What the admin console and the daemon say to each other: requests, replies, and their bytes.

One JSON object each way over a ZeroMQ DEALER - ROUTER pair: a request with a number, and the reply
that bears the same number. Unknown fields, types and versions are errors: a console that is newer
or older than the daemon is told so instead of half understood.
"""

from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from daemon.admin_commands import Command
from daemon.admin_views import AuditLine, EventLine, RequestLine, SloWindow, Status
from daemon.slo import Targets
from daemon.timelines import RequestTimeline
from ipc.placement_file import PlacementFile

ADMIN_VERSION = 1
MAX_ADMIN_MESSAGE_BYTES = 1 << 20

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question; `call_id` comes back with the answer."""

    version: int
    call_id: Annotated[int, msgspec.Meta(ge=0)]
    command: Command


# ---- replies --------------------------------------------------------------------------------


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    """The node's status."""

    status: Status


class RequestsAre(msgspec.Struct, frozen=True, tag=True):
    """Some requests, and whether there are more than are told."""

    requests: tuple[RequestLine, ...]
    is_truncated: bool
    num_open: int


class TimelinesAre(msgspec.Struct, frozen=True, tag=True):
    """Latest first; times are the daemon's CLOCK_MONOTONIC, and so is `now_s`."""

    timelines: tuple[RequestTimeline, ...]
    now_s: float


class SloIs(msgspec.Struct, frozen=True, tag=True):
    """The targets and how they were met, the shortest window first."""

    targets: Targets
    windows: tuple[SloWindow, ...]


class PlanIs(msgspec.Struct, frozen=True, tag=True):
    """The placement that runs, as a placement file."""

    placement: PlacementFile


class ConfigIs(msgspec.Struct, frozen=True, tag=True):
    """The configuration in effect: every key, with what it was set to or its default."""

    config: dict[str, Any]


class VersionIs(msgspec.Struct, frozen=True, tag=True):
    """The daemon's versions: its own, and of what is spoken here."""

    version: str
    admin_version: int
    worker_protocol: int
    placement_version: int
    python: str
    pid: int


class BooksAre(msgspec.Struct, frozen=True, tag=True):
    """What the leaders answered to an audit."""

    books: tuple[AuditLine, ...]


class EventsAre(msgspec.Struct, frozen=True, tag=True):
    """Events in order. `next_after` is what to ask for next; `num_lost` of those that were asked
    for are not kept any more."""

    events: tuple[EventLine, ...]
    next_after: int
    num_lost: int


class WouldDo(msgspec.Struct, frozen=True, tag=True):
    """Nothing was done; this is what would be."""

    sentences: tuple[str, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command was carried out; what came of it, in words."""

    said: str = ""


class FailureCode(StrEnum):
    """Why a command was not carried out."""

    BAD_REQUEST = "bad_request"
    NOT_PERMITTED = "not_permitted"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command was not carried out; one sentence says why."""

    code: FailureCode
    message: str


Answer = (
    StatusIs
    | RequestsAre
    | TimelinesAre
    | SloIs
    | PlanIs
    | ConfigIs
    | VersionIs
    | BooksAre
    | EventsAre
    | WouldDo
    | Done
    | Failed
)


class Reply(msgspec.Struct, frozen=True):
    """One answer, to the request of that number (None: the request could not be read)."""

    call_id: int | None
    answer: Answer


class BadMessage(Exception):
    """Bytes that are not of this protocol."""


def encode(message: Request | Reply) -> bytes:
    return orjson.dumps(msgspec.to_builtins(message))


def read_request(body: bytes) -> Request:
    """Raises BadMessage, with the path to the field, unless it is a request of our version."""
    raw = _loaded(body)
    version = raw.get("version") if isinstance(raw, dict) else None
    # Before anything else: another version may have other commands.
    if isinstance(version, int) and version != ADMIN_VERSION:
        raise BadMessage(
            f"the console speaks version {version}, this daemon speaks {ADMIN_VERSION}"
        )
    return _converted(raw, Request)


def read_reply(body: bytes) -> Reply:
    """Raises BadMessage unless it is a reply."""
    return _converted(_loaded(body), Reply)


def _loaded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadMessage(str(error)[:200]) from error


def _converted(raw: Any, into: type[T]) -> T:
    try:
        return msgspec.convert(raw, into)
    except msgspec.ValidationError as error:
        raise BadMessage(str(error)[:200]) from error
