"""The load that a deployment can be sent: what is too long is left out or cut, and counted."""

from dataclasses import dataclass

from planner.arguments import Load
from planner.simulate.build import Built
from planner.workload.lengths import Lengths, Overlong, TableLengths
from planner.workload.requests import Ints
from planner.workload.workload import Workload

NUM_SAMPLED = 10_000  # of lengths that come from parameters


@dataclass(frozen=True)
class FittingLoad:
    """The workload under the limit, and a note where that left something out."""

    workload: Workload
    max_total_tokens: int
    note: str | None


def fitting_load(load: Load, built: Built) -> FittingLoad:
    """Requests no longer than the model's positions (or as told) and the smallest pool.

    Raises:
        WorkloadError: the workload is not one, or nothing of it fits.
    """
    told, pool = load.rules.max_total_tokens, built.service.max_tokens
    positions = built.shape.max_positions
    limits = {
        "the smallest KV pool": pool,
        "as told" if told is not None else "the model's positions": told or positions,
    }
    reason = min(limits, key=lambda name: limits[name])
    limit = limits[reason]
    workload = load.limited(limit).parsed()
    return FittingLoad(workload, limit, _note(load, workload.name, limit, reason))


def _note(load: Load, name: str, limit: int, reason: str) -> str | None:
    """How many requests the limit touched; None where it touched none."""
    total_tokens = _total_tokens(load.limited(None).parsed().lengths, load.seed)
    num_over = int((total_tokens > limit).sum())
    if not num_over:
        return None
    fate = "left out" if load.rules.overlong is Overlong.DROP else "cut"
    return (
        f"{num_over} of {len(total_tokens)} requests of {name} are longer than "
        f"{limit} tokens ({reason}) and were {fate}"
    )


def _total_tokens(lengths: Lengths, seed: int) -> Ints:
    """Of all rows there are, or of a sample."""
    if isinstance(lengths, TableLengths):
        return lengths.input_tokens + lengths.output_tokens
    inputs, outputs = lengths.draw(NUM_SAMPLED, seed)
    return inputs + outputs
