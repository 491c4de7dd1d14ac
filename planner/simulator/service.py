"""What is simulated: instances with their latency models and pools, and the daemon's own costs."""

from dataclasses import dataclass, field

from gpu_workers.batching import BatchLimits
from ipc.vocabulary import Role
from planner.errors import PlannerError
from planner.latency.interface import LatencyModel


@dataclass(frozen=True)
class InstanceModel:
    """One instance: what it does, how fast, and how much it holds.

    `chunk_tokens` belongs to mixed instances alone: the token budget of a step that computes
    prompts in chunks beside its decodes; without it, waiting prompts run whole and first.
    """

    role: Role
    latency: LatencyModel
    kv_blocks: int
    limits: BatchLimits
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Overheads:
    """What the service adds to the engine's step times, in seconds.

    Args:
        arrival_s: from the client's send to the prefill leader's queue.
        handover_s: from the end of a prefill to the decode leader's queue.
        token_s: from the end of a step to the client.
        prefill_step_s: a prefill leader's own work for each step, not overlapped with it.
        decode_step_s: the same of a decode leader, for each step ...
        decode_row_s: ... and for each sequence in it.
    """

    arrival_s: float = 0.0
    handover_s: float = 0.0
    token_s: float = 0.0
    prefill_step_s: float = 0.0
    decode_step_s: float = 0.0
    decode_row_s: float = 0.0


@dataclass(frozen=True)
class Speculation:
    """Each decode step drafts `num_drafted` tokens; each is accepted with `acceptance` after the
    one before it was. The latency model must know the drafted tokens' cost by itself."""

    num_drafted: int
    acceptance: float


@dataclass(frozen=True)
class Service:
    """Everything between the client and the devices.

    Args:
        shares_link: all pulls share one link; otherwise each decode instance has its own. Either
            way pulls on a link take turns.
        pull_stalls_decode: a pull is done by the decode leader between two steps, as CPU workers
            do, rather than beside them.
    """

    instances: tuple[InstanceModel, ...]
    block_size: int = 16
    overheads: Overheads = field(default_factory=Overheads)
    shares_link: bool = False
    pull_stalls_decode: bool = False
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if not any(i.role.prefills for i in self.instances):
            raise PlannerError("nobody prefills: the service needs a prefill or a mixed instance")
        if not any(i.role.decodes for i in self.instances):
            raise PlannerError("nobody decodes: the service needs a decode or a mixed instance")

    @property
    def num_devices(self) -> int:
        """Of all instances together."""
        return sum(i.latency.num_devices for i in self.instances)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that every pool can hold, as the service's admission has it."""
        return min(i.kv_blocks for i in self.instances) * self.block_size
