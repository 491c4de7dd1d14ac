"""What a console is shown of a node, as declared types: the nouns of the admin protocol.

Seconds, bytes and counts, never formatted text; names end in their unit. How they look on a
terminal is the console's business, how they are gathered the node's.
"""

from enum import StrEnum

import msgspec

from ipc.vocabulary import Role


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

    @property
    def agree(self) -> bool:
        return self.free + self.held + self.in_use == self.total


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


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a list. `age_s` is since its arrival, up to its end if it has ended."""

    number: int
    label: str
    state: str
    instance: str | None
    num_prompt: int
    num_output: int
    num_choices: int
    num_retries: int
    age_s: float
    ttft_s: float | None


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader answered to an audit of its block books. `faults` are those that stand;
    `faults_ever` are counted since it started: each is in the log."""

    instance: str
    has_answered: bool
    blocks: BlockCounts = BlockCounts()
    faults: int = 0
    faults_ever: int = 0

    @property
    def is_sound(self) -> bool:
        return self.has_answered and self.blocks.agree and self.faults == 0


class SloWindow(msgspec.Struct, frozen=True, kw_only=True):
    """How well the targets were met within a window; None where nothing was answered."""

    window_s: float
    num_requests: int
    attainment: float | None
    ttft_attainment: float | None
    tpot_attainment: float | None
    goodput_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None


class EventKind(StrEnum):
    """What events there are."""

    STARTED = "started"
    READY = "ready"
    DIED = "died"
    WEDGED = "wedged"
    STOPPED = "stopped"  # on purpose
    QUARANTINED = "quarantined"
    ADDED = "added"
    REMOVED = "removed"
    DRAIN_BEGAN = "drain_began"
    DRAIN_ENDED = "drain_ended"
    PLAN_APPLIED = "plan_applied"
    ORDERED = "ordered"  # by a console
    RELOADED = "reloaded"
    REFUSED = "refused"
    AUDIT_FAILED = "audit_failed"


class EventLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `number` counts them without gaps; `at_s` is seconds since 1970, UTC."""

    number: int
    at_s: float
    kind: EventKind
    subject: str
    text: str
