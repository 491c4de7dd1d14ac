"""The service that a deployment in words makes, with what a reader must know about it."""

from dataclasses import dataclass, field

from ipc.vocabulary import Parallelism, Role
from planner.bench.calibrate import Calibration
from planner.deployment import (
    Group,
    batch_limits,
    leader_computes,
    plans_ahead,
    saturation_tokens,
)
from planner.devices import DeviceSheet
from planner.errors import InfeasibleShape, PlannerError, ProfileError
from planner.latency.choose import device_of
from planner.latency.profile_file import read_profile
from planner.latency.published import doubt
from planner.memory import GIB, block_bytes, kv_capacity
from planner.model_catalog import model_shape
from planner.model_shape import ModelShape
from planner.simulate.latencies import target_latency, with_drafts
from planner.simulate.options import Bits, Deployment
from planner.simulator.service import InstanceModel, Service, Speculation


@dataclass(frozen=True)
class Built:
    """The service, its instances by group, and notes in whole sentences. `calibration` is in the
    service already."""

    service: Service
    groups: tuple[tuple[Group, InstanceModel], ...]
    shape: ModelShape
    notes: tuple[str, ...]
    calibration: Calibration = field(default_factory=Calibration)


def build(asked: Deployment) -> Built:
    """Check the deployment in substance and make it.

    Raises:
        PlannerError: it cannot be; says in numbers why.
    """
    shape = _shape(asked)
    if asked.drafting is not None and any(g.role is Role.MIXED for g in asked.groups):
        raise PlannerError("--speculate needs decode instances: mixed ones do not speculate")
    models = [_instance(asked, shape, group) for group in asked.groups]
    bare = Service(
        instances=tuple(
            model
            for group, model in zip(asked.groups, models, strict=True)
            for _ in range(group.count)
        ),
        block_size=asked.settings.memory.block_size,
        overheads=asked.settings.overheads,
        shares_link=asked.settings.shares_link,
        pull_stalls_decode=asked.settings.pull_stalls_decode,
        speculation=_speculation(asked),
    )
    is_calibrated = asked.calibration != Calibration()
    service = asked.calibration.apply(bare) if is_calibrated else bare
    groups = _by_group(asked.groups, service)
    return Built(service, groups, shape, tuple(_notes(asked)), asked.calibration)


def _shape(asked: Deployment) -> ModelShape:
    """The model with the element sizes asked for; a profile's keys and values are of its dtype."""
    shape, bits = model_shape(asked.known.model), asked.bits
    if asked.known.profile is not None and bits != Bits():
        raise PlannerError(
            f"the coefficients {asked.known.profile} are of 16-bit weights and KV: other bits "
            "need a roofline (--device alone)"
        )
    kv_bits = bits.kv or shape.kv_bits
    if bits.kv is None and asked.known.tables:
        kv_bits = 8 * read_profile(asked.known.tables[0]).dtype.num_bytes
    return shape.quantised(
        weight_bits=bits.weights or shape.weight_bits,
        kv_bits=kv_bits,
        compute_bits=bits.compute or shape.compute_bits,
    )


def _instance(asked: Deployment, shape: ModelShape, group: Group) -> InstanceModel:
    pulls = group.role.decodes and any(g.role is Role.PREFILL for g in asked.groups)
    target = target_latency(asked, shape, group.parallelism, pulls=pulls)
    tokens = asked.settings.prefill_tokens or saturation_tokens(target)
    latency = target
    if asked.drafting is not None:
        latency = with_drafts(target, asked.drafting, asked.known, group.parallelism)
    return InstanceModel(
        role=group.role,
        latency=latency,
        kv_blocks=_kv_blocks(asked, shape, group.parallelism),
        limits=batch_limits(group, asked.settings, tokens),
        chunk_tokens=group.chunk_tokens,
        rules=group.rules,
        plans_ahead=plans_ahead(group, target),
        leader_computes=leader_computes(target),
    )


def _kv_blocks(asked: Deployment, shape: ModelShape, parallelism: Parallelism) -> int:
    """As told, or what the weights leave of the devices' memory."""
    size = asked.settings.memory.block_size
    if asked.settings.kv_tokens is not None:
        return _at_least_one(asked.settings.kv_tokens // size, size)
    if asked.kv_cache_gib is not None:
        block = sum(block_bytes(s, p, size) for s, p in _residents(asked, shape, parallelism))
        return _at_least_one(int(asked.kv_cache_gib * GIB // block), size)
    device = device_of(asked.known)
    if device is None:
        raise ProfileError(
            "how much an instance holds is not known: give --kv-tokens, --kv-cache-gib or --device"
        )
    return _left_by_weights(asked, shape, parallelism, device)


def _left_by_weights(
    asked: Deployment, shape: ModelShape, parallelism: Parallelism, device: DeviceSheet
) -> int:
    rules = asked.settings.memory
    parts = [kv_capacity(s, device, p, rules) for s, p in _residents(asked, shape, parallelism)]
    if len(parts) == 1:
        return parts[0].num_blocks
    weights = sum(part.weight_bytes_per_device for part in parts)
    usable = device.memory_bytes * (rules.utilisation - rules.activations)
    num_blocks = int((usable - weights) // sum(part.block_bytes_per_device for part in parts))
    if num_blocks < 1:
        raise InfeasibleShape(
            f"{shape.name} and its draft model do not fit {device.name} together: their weights "
            f"take {weights / GIB:.1f} GiB of {usable / GIB:.1f} GiB that may be used"
        )
    return num_blocks


def _residents(
    asked: Deployment, shape: ModelShape, parallelism: Parallelism
) -> list[tuple[ModelShape, Parallelism]]:
    """What shares a device's memory: the model, and the draft model beside it."""
    residents = [(shape, parallelism)]
    if asked.drafting is not None and asked.drafting.model is not None:
        residents.append((model_shape(asked.drafting.model), Parallelism(parallelism.tp)))
    return residents


def _at_least_one(num_blocks: int, block_size: int) -> int:
    if num_blocks < 1:
        raise PlannerError(
            f"the KV pool asked for is smaller than one block of {block_size} tokens"
        )
    return num_blocks


def _speculation(asked: Deployment) -> Speculation | None:
    drafting = asked.drafting
    return None if drafting is None else Speculation(drafting.num_drafted, drafting.acceptance)


def _by_group(
    groups: tuple[Group, ...], service: Service
) -> tuple[tuple[Group, InstanceModel], ...]:
    """One instance for each group, as it is after calibration."""
    pairs = []
    first = 0
    for group in groups:
        pairs.append((group, service.instances[first]))
        first += group.count
    return tuple(pairs)


def _notes(asked: Deployment) -> list[str]:
    notes = _doubts(asked)
    if asked.known.tables and asked.bits.weights is not None:
        notes.append("--weight-bits changes the memory alone: step times are as profiled")
    return notes


def _doubts(asked: Deployment) -> list[str]:
    known = asked.known
    if known.profile is None:
        return []
    engine = known.profile.partition("-")[0]
    degrees = sorted({group.parallelism.tp for group in asked.groups})
    found = {tp: doubt(engine, known.model, tp) for tp in degrees}
    return [
        f"the coefficients of {known.model} at tp {tp} are doubtful: {why}"
        for tp, why in found.items()
        if why is not None
    ]
