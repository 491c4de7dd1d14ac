"""A deployment in words: so many instances of each role and shape; and the service it makes.

What a user names (a model, a device, degrees, counts) becomes what the simulator runs: a latency
model, a KV capacity and batch limits for each instance.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ipc.prefill_policy import BatchLimits
from ipc.profile_table import SATURATION, ProfileTable
from ipc.vocabulary import DeviceKind, Parallelism, PrefillPolicy, Role
from planner.errors import ProfileError
from planner.latency.choose import Knowledge, device_of, latency_model
from planner.latency.interface import Chunk, LatencyModel
from planner.latency.measured import MeasuredLatency
from planner.latency.pull import WithPull
from planner.latency.scaled import ScaledLatency
from planner.memory import MemoryRules, kv_capacity
from planner.model_catalog import model_shape
from planner.simulator.service import InstanceModel, MixedRules, Overheads, Service, Speculation

LENGTHS = range(16, 8192 + 1, 16)  # prompts among which L_m is looked for


@dataclass(frozen=True)
class Group:
    """`count` equal instances. `chunk_tokens` is for mixed ones that prefill in chunks, `rules` for
    those that do so as another engine does."""

    role: Role
    count: int
    parallelism: Parallelism = field(default_factory=Parallelism)
    chunk_tokens: int | None = None
    rules: MixedRules = MixedRules.OURS


@dataclass(frozen=True)
class Settings:
    """What all instances share.

    Args:
        prefill_tokens: L_m; None asks each instance's latency model (`saturation_tokens`).
        max_batch: sequences that decode together at most.
        prefill_policy: of all that prefill in steps of prompts alone.
        kv_tokens: what each instance's pool holds; None computes it from the device's memory.
        shares_link, pull_stalls_decode, speculation: see `Service`.
    """

    prefill_tokens: int | None = None
    max_batch: int = 256
    prefill_policy: PrefillPolicy = PrefillPolicy.FCFS
    kv_tokens: int | None = None
    memory: MemoryRules = field(default_factory=MemoryRules)
    overheads: Overheads = field(default_factory=Overheads)
    shares_link: bool = False
    pull_stalls_decode: bool = False
    speculation: Speculation | None = None


def service(
    known: Knowledge,
    groups: tuple[Group, ...],
    settings: Settings,
    *,
    choose: Callable[[Knowledge, Parallelism], LatencyModel] = latency_model,
) -> Service:
    """The service of these instances.

    Raises:
        InfeasibleShape: an instance does not fit its devices, with the reason.
        ProfileError: nothing is known of a shape.
    """
    models: list[InstanceModel] = []
    for group in groups:
        model = instance_model(known, group, settings, choose(known, group.parallelism))
        models += [model] * group.count
    return Service(
        instances=tuple(models),
        block_size=settings.memory.block_size,
        overheads=settings.overheads,
        shares_link=settings.shares_link,
        pull_stalls_decode=settings.pull_stalls_decode,
        speculation=settings.speculation,
    )


def instance_model(
    known: Knowledge, group: Group, settings: Settings, latency: LatencyModel
) -> InstanceModel:
    """One instance of the group."""
    tokens = settings.prefill_tokens or saturation_tokens(latency)
    return InstanceModel(
        role=group.role,
        latency=latency,
        kv_blocks=kv_blocks(known, group.parallelism, settings),
        limits=batch_limits(group, settings, tokens),
        chunk_tokens=group.chunk_tokens,
        rules=group.rules,
        plans_ahead=plans_ahead(group, latency),
        leader_computes=leader_computes(latency),
    )


def plans_ahead(group: Group, latency: LatencyModel) -> bool:
    """Whether its leader has two steps under way, as on GPUs where no stage needs to be told what
    was drawn. Other engines' coefficients, and rooflines, are of one step after the other."""
    table = measured_table(latency)
    is_ours = table is not None and table.device_kind is DeviceKind.CUDA
    return is_ours and latency.num_stages == 1 and not group.rules.are_vllms


def leader_computes(latency: LatencyModel) -> bool:
    """Whether its leader is busy with a stage of its own, as on CPU: a launch on a GPU returns."""
    table = measured_table(latency)
    return table is not None and table.device_kind is DeviceKind.CPU and latency.num_stages > 1


def measured_table(latency: LatencyModel) -> ProfileTable | None:
    """What `distserve profile` measured, whatever has been put on top of it since."""
    while isinstance(latency, ScaledLatency | WithPull):
        latency = latency.model
    return latency.table if isinstance(latency, MeasuredLatency) else None


def batch_limits(group: Group, settings: Settings, prefill_tokens: int) -> BatchLimits:
    """Of an instance whose L_m is known."""
    is_chunked = group.chunk_tokens is not None
    policy = PrefillPolicy.FCFS if is_chunked else settings.prefill_policy
    return BatchLimits(prefill_tokens, settings.max_batch, policy)


def kv_blocks(known: Knowledge, parallelism: Parallelism, settings: Settings) -> int:
    """Blocks of an instance's pool: as told, or what the weights leave of its devices' memory."""
    if settings.kv_tokens is not None:
        return settings.kv_tokens // settings.memory.block_size
    device = device_of(known)
    if device is None:
        raise ProfileError("how much an instance holds is not known: give a device, or KV tokens")
    shape = model_shape(known.model)
    return kv_capacity(shape, device, parallelism, settings.memory).num_blocks


def saturation_tokens(latency: LatencyModel) -> int:
    """L_m: the shortest prompt whose prefill reaches `SATURATION` of the best throughput of any
    single prompt (paper section 3.1); measured where a table knows it."""
    if (table := measured_table(latency)) is not None:
        return table.saturation_tokens
    speeds = [length / latency.prefill([Chunk(length)]).seconds for length in LENGTHS]
    enough = SATURATION * max(speeds)
    return next(n for n, speed in zip(LENGTHS, speeds, strict=True) if speed >= enough)
