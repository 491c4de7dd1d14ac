"""What the admin console and the daemon say to each other, as declared types.

One JSON object each way over a ZeroMQ DEALER - ROUTER pair on an `ipc://` socket: a request with
a number, and the reply that bears the same number. Unknown fields, types and versions are
errors: a console that is newer or older than the daemon is told so instead of half understood.
"""

from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
import orjson

from ipc.vocabulary import Role

ADMIN_VERSION = 1
MAX_ADMIN_MESSAGE_BYTES = 1 << 20
MAX_DEADLINE_S = 86_400.0

T = TypeVar("T")


class NodeState(StrEnum):
    """How the node is: degraded when an instance is down that was up, or is not up yet while
    others serve. A degraded node takes requests as long as somebody does each phase."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"


class BlockCounts(msgspec.Struct, frozen=True):
    """One KV pool's books: free + held + in_use = total."""

    total: int = 0
    free: int = 0
    held: int = 0
    in_use: int = 0


class WorkerStatus(msgspec.Struct, frozen=True):
    """One process of an instance."""

    stage: int
    tp_rank: int
    device: int
    pid: int


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as its supervisor and its leader last reported it; `pid` is the leader's."""

    name: str
    role: Role
    state: str
    tp: int = 1
    pp: int = 1
    pid: int | None = None
    workers: tuple[WorkerStatus, ...] = ()
    epoch: int = 0
    restarts: int = 0
    last_exit: str | None = None
    queue_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks: BlockCounts = BlockCounts()
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    pulls: int = 0
    kernels: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one moment. `requests` counts them by phase."""

    state: NodeState
    model: str
    version: str
    pid: int
    uptime_s: float
    requests: dict[str, int]
    instances: tuple[InstanceStatus, ...]


# ---- requests -------------------------------------------------------------------------------


class GetStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `StatusIs`."""


class Drain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take nothing new and finish what is there. Answered when that is done, or too late."""

    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]


class Undrain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take requests again."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question; `call_id` comes back with the answer."""

    version: int
    call_id: Annotated[int, msgspec.Meta(ge=0)]
    command: GetStatus | Drain | Undrain


# ---- replies --------------------------------------------------------------------------------


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    """The node's status."""

    status: Status


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command was carried out."""


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


Answer = StatusIs | Done | Failed


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
    request = _convert(body, Request)
    if request.version != ADMIN_VERSION:
        raise BadMessage(
            f"the console speaks version {request.version}, this daemon speaks {ADMIN_VERSION}"
        )
    return request


def read_reply(body: bytes) -> Reply:
    """Raises BadMessage unless it is a reply."""
    return _convert(body, Reply)


def _convert(body: bytes, into: type[T]) -> T:
    try:
        return msgspec.convert(orjson.loads(body), into)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise BadMessage(str(error)[:200]) from error
