"""What is simulated: instances with their latency models and pools, and the daemon's own costs."""

from dataclasses import dataclass, field
from enum import StrEnum

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import PrefillPolicy, Role
from planner.errors import PlannerError
from planner.latency.interface import LatencyModel


class MixedRules(StrEnum):
    """Whose rules of admission and preemption a mixed instance follows.

    VLLM is vLLM's V1 engine (`planner.simulator.vllm`). VLLM_STAMPED is the same for arrivals that
    are the engine's own `queued_ts`, which it writes when it looks into its queue, between two
    steps: such a request arrives at the boundary nearest to it, rather than during a step.
    """

    OURS = "ours"
    VLLM = "vllm"
    VLLM_STAMPED = "vllm-stamped"

    @property
    def are_vllms(self) -> bool:
        return self is not MixedRules.OURS


@dataclass(frozen=True)
class InstanceModel:
    """One instance: what it does, how fast, and how much it holds.

    `chunk_tokens` belongs to mixed instances alone: the token budget of a step that computes
    prompts in chunks beside its decodes; without it, waiting prompts run whole and first. Under
    vLLM's rules it is `max_num_batched_tokens`; and `kv_blocks` are those that requests can have,
    one less than its `num_gpu_blocks`. `plans_ahead`: while a step runs the leader has launched
    the next one already, as ours do on GPUs, so that who comes meanwhile misses that one.
    `leader_computes`: of several stages the first one is the leader's own work, as on CPU, so that
    it hears of what the last one drew when it is through with the next step there.
    """

    role: Role
    latency: LatencyModel
    kv_blocks: int
    limits: BatchLimits
    chunk_tokens: int | None = None
    rules: MixedRules = MixedRules.OURS
    plans_ahead: bool = False
    leader_computes: bool = False

    def __post_init__(self) -> None:
        assert not (self.plans_ahead and self.latency.num_stages > 1), "a stage waits for plans"
        if self.rules.are_vllms and (self.role is not Role.MIXED or self.chunk_tokens is None):
            raise PlannerError(
                "vLLM's rules are for mixed instances with a token budget: its engine prefills in "
                "chunks"
            )
        is_fcfs = self.limits.prefill_policy is PrefillPolicy.FCFS
        if self.chunk_tokens is not None and not is_fcfs:
            raise PlannerError("chunks beside decodes are taken first come, first served")


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
