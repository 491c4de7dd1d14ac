"""What a search found, in sentences."""

import math
import re
from collections.abc import Sequence

from ipc.placement_file import PlacementFile
from planner.intervals import Interval
from planner.placement.choices import Candidate, Chosen, Dropped, Objective
from planner.placement.results import Asked, Cost, Found

# Reasons are sentences with numbers of their own: these are the kinds of them, in words.
KINDS = {
    "not enough memory": r"does not fit|no KV block|its pool holds|leave no batch",
    "above a target even for a request alone": r"at best for",
    "cannot beat what was found": r"was found",
    "no room on the nodes": r"do not pack|must share one|do not fit a node",
    "nothing is known of the shape": r"nothing is known|has no tp|has no \w+ at",
}


def headline(asked: Asked) -> str:
    """What the answer is to."""
    nodes = f"{asked.num_nodes} node{'s' if asked.num_nodes > 1 else ''}"
    rate = "" if asked.rate is None else f" at {asked.rate:.3g} requests per second"
    return (
        f"{asked.model} on {nodes} of {asked.devices_per_node} {asked.device}, "
        f"{asked.workload}{rate}; {_told_aim(asked)}"
    )


def recommendation(found: Found, file: PlacementFile) -> str:
    """What to deploy, what it gives, why, and whether it can be served: one paragraph."""
    chosen = found.recommended
    best = chosen.best
    head = (
        f"Recommended: {told_placement(chosen)}, {_devices(chosen.num_devices)} in all. It carries "
        f"{told_rate(chosen.rate, best.goodput.is_bounded)} requests per second, "
        f"{told_rate(best.per_device, best.goodput.is_bounded)} per device, and is limited by "
        f"{best.goodput.limited_by}."
    )
    reasons = found.reasons
    if not found.baselines:
        reasons = ("services with both phases on the same devices were not looked at (--quick)",)
    parts = [head, *map(_sentence, reasons)]
    if found.cost is not None:
        parts.append(told_cost(found.cost))
    if not file.servable:
        parts.append(
            f"It cannot be served yet, since keys and values would have to cross nodes: "
            f"{file.crossings[0]}{_more(len(file.crossings) - 1)}; --affinity low finds what can."
        )
    return " ".join(parts)


def told_placement(chosen: Chosen) -> str:
    """`2 copies of 1 prefill (tp 2, pp 1) + 1 decode (tp 1, pp 1)`."""
    unit = told_candidate(chosen.best.candidate)
    return unit if chosen.num_copies == 1 else f"{chosen.num_copies} copies of {unit}"


def told_candidate(candidate: Candidate) -> str:
    """Its instances; of chunked ones the chunk, of cut ones the segments."""
    told = []
    for group in candidate.groups:
        shape = group.parallelism
        chunk = f", chunks of {group.chunk_tokens}" if group.chunk_tokens else ""
        told.append(f"{group.count} {group.role} (tp {shape.tp}, pp {shape.pp}{chunk})")
    segments = f" in {candidate.inter_op} segments" if candidate.inter_op > 1 else ""
    return " + ".join(told) + segments


def short_candidate(candidate: Candidate) -> str:
    """The same for tables, tp x pp: `1 prefill 2x1 + 1 decode 1x1`."""
    told = []
    for group in candidate.groups:
        shape = group.parallelism
        chunk = f", chunks of {group.chunk_tokens}" if group.chunk_tokens else ""
        told.append(f"{group.count} {group.role} {shape.tp}x{shape.pp}{chunk}")
    segments = f" ({candidate.inter_op} segments)" if candidate.inter_op > 1 else ""
    return " + ".join(told) + segments


def told_rate(rate: Interval, is_bounded: bool = True) -> str:
    """`1.9 (1.8 to 2.0)`, and where no end was found `at least 5`."""
    if not is_bounded:
        return f"at least {rate.value:.3g}"
    return f"{rate.value:.3g} ({told_range(rate)})"


def told_range(interval: Interval) -> str:
    high = "no end" if math.isinf(interval.high) else f"{interval.high:.3g}"
    return f"{interval.low:.3g} to {high}"


def told_cost(cost: Cost) -> str:
    """In the currency of the price that was given."""
    return (
        f"It costs {cost.per_hour:.4g} per hour: {cost.per_thousand_requests:.3g} per 1,000 "
        f"requests, {cost.per_million_tokens:.3g} per million tokens "
        f"({cost.per_million_output_tokens:.3g} per million output tokens)."
    )


def told_devices(file: PlacementFile) -> list[str]:
    """Where each instance is: `prefill-0  node-0: 0 1`."""
    lines = []
    width = max(len(instance.name) for instance in file.instances)
    for instance in file.instances:
        stages = [f"{stage.node}: {' '.join(map(str, stage.devices))}" for stage in instance.stages]
        lines.append(f"  {instance.name:<{width}}  {' | '.join(stages)}")
    return lines


def told_dropped(dropped: Sequence[Dropped]) -> list[str]:
    """How many for which kind of reason, the most frequent first, with an example of each."""
    by_kind: dict[str, list[Dropped]] = {}
    for one in dropped:
        by_kind.setdefault(_kind(one.reason), []).append(one)
    ordered = sorted(by_kind.items(), key=lambda pair: -len(pair[1]))
    return [f"  {len(some)}: {kind}, such as: {told_drop(some[0])}" for kind, some in ordered]


def told_drop(one: Dropped) -> str:
    return f"{told_candidate(one.candidate)}: {one.reason}"


def _kind(reason: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, reason)), "other")


def _told_aim(asked: Asked) -> str:
    slo = asked.slo
    if asked.objective is Objective.THROUGHPUT:
        return "the highest throughput per device, without targets"
    aim = "fewest devices" if asked.objective is Objective.DEVICES else "highest goodput per device"
    return (
        f"{aim} with TTFT <= {1000 * slo.ttft_s:g} ms and TPOT <= {1000 * slo.tpot_s:g} ms for "
        f"{slo.attainment:.0%}"
    )


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _more(count: int) -> str:
    return f", and {count} more" if count else ""


def _sentence(text: str) -> str:
    """Begun and ended as one."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
