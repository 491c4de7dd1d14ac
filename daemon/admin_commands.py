"""What a console may ask of a daemon, as declared types: questions, waits and orders.

A question is answered at once and changes nothing. A wait is answered when something has come or
its time is up. An order changes something, or says what it would change: it is logged with who
gave it.
"""

import re
from typing import Annotated

import msgspec

from ipc.vocabulary import Role

MAX_DEADLINE_S = 86_400.0
MAX_LISTED = 200
MAX_WAIT_S = 30.0
MAX_PLACEMENT_BYTES = 512 * 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Listed = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_PLACEMENT_BYTES)]
DEFAULT_DEADLINE_S = 120.0
_WORD = re.compile(r"[A-Za-z0-9._-]+")


# ---- questions ------------------------------------------------------------------------------


class GetStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `StatusIs`."""


class GetRequests(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `RequestsAre`: open ones, oldest first; of one state, ended ones too; or the
    `slowest`, open or ended."""

    state: Name | None = None
    slowest: Listed | None = None


class GetTimelines(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `TimelinesAre`: of one request, by number or label, or of the last that ended."""

    request: Name | None = None
    last: Listed = 1


class GetSlo(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `SloIs`."""


class GetPlan(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `PlanIs`."""


class GetConfig(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `ConfigIs`."""


class GetVersion(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by `VersionIs`."""


Question = GetStatus | GetRequests | GetTimelines | GetSlo | GetPlan | GetConfig | GetVersion


# ---- waits ----------------------------------------------------------------------------------


class AuditBooks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Every leader looks over its block books now. Answered by `BooksAre`, within `wait_s`."""

    wait_s: Wait = 5.0


class GetEvents(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Events after that number, or the last ones there are; answered by `EventsAre` as soon as
    there are any, or with none after `wait_s`."""

    after: Annotated[int, msgspec.Meta(ge=0)] | None = None
    wait_s: Wait = 0.0


Waiting = AuditBooks | GetEvents


# ---- orders ---------------------------------------------------------------------------------


class Abort(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """End a request, by number or label; its client is told."""

    request: Name
    dry_run: bool = False


class ApplyPlan(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take over the placement that the text of a placement file describes."""

    text: Text
    deadline_s: Seconds = DEFAULT_DEADLINE_S
    dry_run: bool = False


class Drain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take nothing new and finish what is there. Answered when that is done, or too late. The
    whole node, or one instance."""

    deadline_s: Seconds = DEFAULT_DEADLINE_S
    instance: Name | None = None
    dry_run: bool = False


class Undrain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take requests again."""

    instance: Name | None = None
    dry_run: bool = False


class Restart(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Drain an instance and replace it by a fresh one."""

    instance: Name
    deadline_s: Seconds = DEFAULT_DEADLINE_S
    dry_run: bool = False


class ScaleAdd(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start one more instance on free devices."""

    role: Role
    tp: Degree = 1
    pp: Degree = 1
    dry_run: bool = False


class ScaleRemove(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Drain an instance and let it go."""

    instance: Name
    deadline_s: Seconds = DEFAULT_DEADLINE_S
    dry_run: bool = False


class SetLogLevel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Log more or less, by one logger or all; as it was before after `for_s`."""

    level: Annotated[str, msgspec.Meta(pattern="^(debug|info|warning|error)$")]
    logger: Annotated[str, msgspec.Meta(max_length=200)] = ""
    for_s: Seconds | None = None
    dry_run: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Drain the daemon and end it. `deadline_s`: None as configured; 0: what is under way ends by
    an error now."""

    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_S)] | None = None
    dry_run: bool = False


Order = (
    Abort | ApplyPlan | Drain | Undrain | Restart | ScaleAdd | ScaleRemove | SetLogLevel | Shutdown
)
Command = Question | Waiting | Order


def spoken(order: Order) -> str:
    """For the log: the order with all it says, but not the text of a whole file."""
    said = {name: getattr(order, name) for name in order.__struct_fields__ if name != "dry_run"}
    if isinstance(order, ApplyPlan):
        said["text"] = f"{len(order.text)} characters"
    words = (f"{name}={_word(value)}" for name, value in said.items() if value not in (None, ""))
    return " ".join([type(order).__name__, *words])


def _word(value: object) -> str:
    """A string cannot pass for more than one, whatever is in it."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else repr(value)
