"""What the latencies and the memory say of a shape before anything is simulated.

A shape is refused where it cannot run, cannot hold the longest request, or cannot meet a target
even for a request alone. Of the others each has a cap: the rate that no schedule can beat. Every
refusal is a sentence with the numbers that it rests on.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ipc.vocabulary import Role
from planner.bounds import (
    DecodeCap,
    Pool,
    decode_rate_cap,
    mean_context,
    prefill_rate_cap,
    tpot_floor_s,
    ttft_floor_s,
)
from planner.deployment import Group
from planner.errors import InfeasibleShape, ProfileError
from planner.placement.choices import Objective, Problem
from planner.placement.known_shapes import KnownShapes
from planner.simulator.service import InstanceModel
from planner.slo import Slo
from planner.verdict import MAX_DRAIN_SHARE
from planner.workload.requests import Floats, Requests

# A batch that just meets the TPOT target at the mean context is not the largest that a run ever
# has: some requests may miss, and shorter contexts leave time. So much more is still possible.
LEEWAY = 1.1
MOST_REQUESTS = 16_000  # of one run
STRICT = 0.9  # below this target so many may miss that the TPOT target bounds no rate
NOT_THERE = "a node has {room} devices, and the {tp} of a stage must share one"


class Limits:
    """Refusals and caps of shapes under one problem, each computed once."""

    def __init__(self, problem: Problem, shapes: KnownShapes, sample: Requests) -> None:
        self._problem = problem
        self._shapes = shapes
        self._sample = sample
        self._longest = int((sample.input_tokens + sample.output_tokens).max())
        self._refusals: dict[Group, str | None] = {}
        self._caps: dict[Group, float] = {}
        self._lifetimes: dict[Group, float] = {}

    def refusal(self, group: Group) -> str | None:
        """Why no instance of the group can serve, or None."""
        one = replace(group, count=1)
        if one not in self._refusals:
            reason = self._why_not(one)
            self._refusals[one] = f"{_named(one)}: {reason}" if reason else None
        return self._refusals[one]

    def cap(self, group: Group) -> float:
        """Requests per second of all instances of a group that is not refused."""
        one = replace(group, count=1)
        if one not in self._caps:
            self._caps[one] = self._cap(one)
        return group.count * self._caps[one]

    def cap_of(self, groups: Sequence[Group]) -> float:
        """Of a service: its weakest phase's."""
        return min(self.cap(group) for group in groups)

    def holds(self, groups: Sequence[Group], length_factor: float) -> bool:
        """Whether every pool holds the longest request when all are so much longer."""
        pools = [self._pool(self._shapes.instance(group)).kv_tokens for group in groups]
        return math.ceil(self._longest * length_factor) + 1 <= min(pools)

    def settling(self, groups: Sequence[Group], rate: float) -> int:
        """Requests that a run at that rate needs so that a lifetime passes within its drain.

        Shorter runs end while large batches still fill up, and promise what does not last.
        """
        lifetime_s = 0.0
        for group in groups:
            if group.role.decodes:
                lifetime_s = max(lifetime_s, self._decode_s(group))
        if (slo := self._slo) is not None:
            lifetime_s += slo.ttft_s
        return min(math.ceil(rate * lifetime_s / MAX_DRAIN_SHARE), MOST_REQUESTS)

    def _decode_s(self, group: Group) -> float:
        """Of nine requests in ten, in the largest batch that the cap is for."""
        one = replace(group, count=1)
        if one not in self._lifetimes:
            self._lifetimes[one] = self._lifetime_s(self._shapes.instance(one))
        return self._lifetimes[one]

    def _lifetime_s(self, instance: InstanceModel) -> float:
        found = self._largest_batch(instance)
        if not 0 < found.rate < math.inf:
            return 0.0
        step_s = found.batch / (found.rate * self._mean_steps)
        lifetime_s = step_s * float(np.quantile(self._steps, 0.9))
        if instance.role is Role.MIXED:  # prompts take turns with the steps
            lifetime_s *= 1 + found.rate / self._prefill_cap(instance)
        return lifetime_s

    def _why_not(self, group: Group) -> str | None:
        room, tp = self._problem.cluster.devices_per_node, group.parallelism.tp
        if tp > room:
            return NOT_THERE.format(room=room, tp=tp)
        try:
            instance = self._shapes.instance(group)
        except (InfeasibleShape, ProfileError) as error:
            return str(error)
        pool = self._pool(instance)
        if self._longest > pool.kv_tokens:
            return (
                f"its pool holds {pool.kv_tokens} tokens, the longest request has {self._longest}"
            )
        return self._above_targets(group, instance) or self._no_batch(group, instance)

    def _above_targets(self, group: Group, instance: InstanceModel) -> str | None:
        slo = self._slo
        if slo is None:
            return None
        share = f"the target share of {slo.attainment:.0%}"
        if group.role.prefills:
            floor_s = ttft_floor_s(instance.latency, self._sample, slo.attainment)
            if floor_s > slo.ttft_s:
                return (
                    f"TTFT {1000 * floor_s:.0f} ms at best for {share}, each alone; the target is "
                    f"{1000 * slo.ttft_s:g} ms"
                )
        if group.role.decodes:
            floor_s = tpot_floor_s(
                instance.latency, self._sample, slo.attainment, self._tokens_per_step
            )
            if floor_s > slo.tpot_s:
                return (
                    f"TPOT {1000 * floor_s:.1f} ms at best for {share}, each alone; the target is "
                    f"{1000 * slo.tpot_s:g} ms"
                )
        return None

    def _no_batch(self, group: Group, instance: InstanceModel) -> str | None:
        if not group.role.decodes or self.cap(group) > 0:
            return None
        context = mean_context(self._sample)
        return (
            f"its pool of {self._pool(instance).kv_tokens} tokens and the TPOT target leave no "
            f"batch of the mean context of {context:.0f} tokens"
        )

    def _cap(self, group: Group) -> float:
        """Mixed instances share their time between prompts and steps. Chunks read the weights for
        both at once, so that of a step only what its rows add is sure to be left."""
        instance = self._shapes.instance(group)
        if group.role is Role.PREFILL:
            return self._prefill_cap(instance)
        if group.role is Role.DECODE:
            return self._decode_cap(instance)
        prefill, decode = self._prefill_cap(instance), self._decode_cap(instance)
        if not min(prefill, decode):
            return 0.0
        if group.chunk_tokens is None:
            return 1 / (1 / prefill + 1 / decode)
        return min(decode, 1 / (1 / prefill + self._rows_s(instance)))

    def _rows_s(self, instance: InstanceModel) -> float:
        """Of each stage, for one request's share of the steps beyond those of an empty batch."""
        found = self._largest_batch(instance)
        micro = max(1, found.batch // instance.latency.num_stages)
        context = micro * mean_context(self._sample)
        full_s = instance.latency.decode(micro, context).seconds(context)
        least_s = instance.latency.decode(1, 1).seconds(1)
        return self._mean_steps * max(full_s - least_s, 0.0) / micro

    def _prefill_cap(self, instance: InstanceModel) -> float:
        tokens = max(instance.limits.prefill_tokens, instance.chunk_tokens or 0)
        return prefill_rate_cap(instance.latency, self._sample, tokens)

    def _decode_cap(self, instance: InstanceModel) -> float:
        pool, per_step = self._pool(instance), self._tokens_per_step
        stable = decode_rate_cap(instance.latency, self._sample, pool, None, per_step).rate
        slo = self._slo
        if slo is None or slo.attainment < STRICT:
            return stable
        in_time = decode_rate_cap(instance.latency, self._sample, pool, slo, per_step).rate
        return min(stable, LEEWAY * in_time)

    def _largest_batch(self, instance: InstanceModel) -> DecodeCap:
        """As the memory and the TPOT target allow it."""
        pool, per_step = self._pool(instance), self._tokens_per_step
        return decode_rate_cap(instance.latency, self._sample, pool, self._slo, per_step)

    @cached_property
    def _steps(self) -> Floats:
        """Decode steps of each request, float64[N]."""
        steps = np.maximum(self._sample.output_tokens - 1, 0)
        return np.asarray(steps / self._tokens_per_step, np.float64)

    @cached_property
    def _mean_steps(self) -> float:
        return float(self._steps.mean())

    def _pool(self, instance: InstanceModel) -> Pool:
        block_size = self._problem.settings.memory.block_size
        return Pool(instance.kv_blocks * block_size, instance.limits.max_batch)

    @property
    def _slo(self) -> Slo | None:
        return None if self._problem.objective is Objective.THROUGHPUT else self._problem.slo

    @property
    def _tokens_per_step(self) -> float:
        """With speculation: (1 - a^(g+1)) / (1 - a) tokens of g drafted ones and their own."""
        speculation = self._problem.settings.speculation
        if speculation is None:
            return 1.0
        a, drafted = speculation.acceptance, speculation.num_drafted
        return float(sum(a**k for k in range(drafted + 1)))


def _named(group: Group) -> str:
    return f"{group.role} at tp {group.parallelism.tp}, pp {group.parallelism.pp}"
