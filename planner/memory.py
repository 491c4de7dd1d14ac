"""What fits on a device: weights, and how many tokens of keys and values beside them.

The rule is the DistServe repository's (profile_memory.py, the same as its workers use): 95 % of
the memory less 1 % for activations and less the weights, cut into blocks. There it is for OPT;
here it is the same rule for grouped heads, experts, latents, gates and quantised weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from ipc.vocabulary import Parallelism
from planner.devices import DeviceSheet
from planner.errors import InfeasibleShape
from planner.model_shape import ModelShape

GIB = 2**30


@dataclass(frozen=True)
class MemoryRules:
    """How a device's memory is shared out.

    Args:
        utilisation: the share that may be used at all.
        activations: the share set aside for activations.
        splits_vocabulary: the token tables are divided among the tensor-parallel ranks. The
            published capacities are for an engine that keeps them whole on every rank.
    """

    block_size: int = 16
    utilisation: float = 0.95
    activations: float = 0.01
    splits_vocabulary: bool = False


@dataclass(frozen=True)
class Capacity:
    """What one instance of a shape holds; per device where it says so."""

    parallelism: Parallelism
    weight_bytes_per_device: float
    block_bytes_per_device: float
    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class Infeasible:
    """A shape that cannot be, and why."""

    parallelism: Parallelism
    reason: str


def weight_bytes(
    shape: ModelShape, parallelism: Parallelism, rules: MemoryRules | None = None
) -> float:
    """Weights on each device: matrices divided by tp, layers by pp, norms whole on every rank.

    Token tables and vectors stay in 16 bits when matrices are quantised.
    """
    tp, rules = parallelism.tp, rules or MemoryRules()
    share = layers_per_stage(shape, parallelism.pp) / shape.num_layers
    matrices = share * shape.matrix_params / tp * shape.weight_bits / 8
    vectors = shape.vector_params + shape.split_bias_params / tp
    tables = shape.embedding_params / (tp if rules.splits_vocabulary else 1)
    return matrices + 2 * (share * shape.num_layers * vectors + tables)


def layers_per_stage(shape: ModelShape, pp: int) -> int:
    """Of the longest stage."""
    return -(-shape.num_layers // pp)


def block_bytes(shape: ModelShape, parallelism: Parallelism, block_size: int) -> float:
    """One block of keys and values on each device of the longest stage."""
    elements = shape.kv_elements_per_layer(parallelism.tp) * block_size
    return layers_per_stage(shape, parallelism.pp) * elements * shape.kv_bits / 8


def kv_capacity(
    shape: ModelShape,
    device: DeviceSheet,
    parallelism: Parallelism,
    rules: MemoryRules | None = None,
) -> Capacity:
    """How much one instance holds; InfeasibleShape says in numbers why it does not run."""
    rules = rules or MemoryRules()
    shape.check(parallelism)
    weights = weight_bytes(shape, parallelism, rules)
    block = block_bytes(shape, parallelism, rules.block_size)
    usable = device.memory_bytes * (rules.utilisation - rules.activations)
    if usable - weights < block:
        raise InfeasibleShape(
            f"{shape.name} at tp {parallelism.tp}, pp {parallelism.pp} does not fit {device.name}: "
            f"weights take {weights / GIB:.1f} GiB of the {usable / GIB:.1f} GiB "
            f"that may be used of {device.memory_gib:g} GiB, and no KV block is left"
        )
    num_blocks = int((usable - weights) // block)
    return Capacity(parallelism, weights, block, num_blocks, rules.block_size)


def survey(
    shape: ModelShape,
    device: DeviceSheet,
    parallelisms: Iterable[Parallelism],
    rules: MemoryRules | None = None,
) -> tuple[list[Capacity], list[Infeasible]]:
    """Which of the shapes run, with their capacity, and why the others do not."""
    feasible: list[Capacity] = []
    infeasible: list[Infeasible] = []
    for parallelism in parallelisms:
        try:
            _check_even_stages(shape, parallelism)
            feasible.append(kv_capacity(shape, device, parallelism, rules))
        except InfeasibleShape as error:
            infeasible.append(Infeasible(parallelism, str(error)))
    return feasible, infeasible


def all_degrees(max_tp: int, max_pp: int, max_devices: int | None = None) -> list[Parallelism]:
    """Every (tp, pp) up to the bounds, whether or not a model runs so: `survey` says which."""
    pairs = product(range(1, max_tp + 1), range(1, max_pp + 1))
    limit = max_devices if max_devices is not None else max_tp * max_pp
    return [Parallelism(tp, pp) for tp, pp in pairs if tp * pp <= limit]


def _check_even_stages(shape: ModelShape, parallelism: Parallelism) -> None:
    """The search takes equal stages alone (as the reference does): unequal ones only wait."""
    if shape.num_layers % parallelism.pp:
        raise InfeasibleShape(
            f"{shape.name} at tp {parallelism.tp}, pp {parallelism.pp}: "
            f"{shape.num_layers} layers do not divide into {parallelism.pp} equal stages"
        )
