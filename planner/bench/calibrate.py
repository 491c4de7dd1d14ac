"""What a running service adds to its profile, read off one live run.

A profile is measured on an idle machine with the engine alone. In service other processes share
its cores and messages take time, so the steps are a little longer and hand-overs are not free.
Five figures say how much: a factor for each phase's steps, what a prefill step costs whatever is
in it, and what a request takes to reach the prefill queue and the decode queue. Other runs are
then predicted with them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from ipc.vocabulary import Role
from planner.bench.live_run import LiveRun
from planner.errors import BenchError
from planner.latency.interface import Chunk, LatencyModel, decode_pace
from planner.latency.scaled import SCALES, ScaledLatency
from planner.simulator.run import simulate
from planner.simulator.service import InstanceModel, Service
from planner.simulator.timeline import Timeline
from planner.workload.requests import Bools, Floats

MIN_REQUESTS = 50
HANDOVER_ROUNDS = 3  # each shifts where in a step the hand-overs arrive a little
SAME_S = 2e-6  # durations of one batch differ by rounding alone


class Calibration(msgspec.Struct, frozen=True):
    """Corrections to a profile, fitted to one live run of `num_requests` requests."""

    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    arrival_s: float = 0.0
    handover_s: float = 0.0
    prefill_step_s: float = 0.0
    num_requests: int = 0

    def apply(self, service: Service) -> Service:
        """The same service, with steps and hand-overs as they were seen."""
        costs = service.overheads
        return replace(
            service,
            instances=tuple(self._corrected(model) for model in service.instances),
            overheads=replace(
                costs,
                prefill_step_s=costs.prefill_step_s + self.prefill_step_s,
                arrival_s=costs.arrival_s + self.arrival_s,
                handover_s=costs.handover_s + self.handover_s,
            ),
        )

    def _corrected(self, model: InstanceModel) -> InstanceModel:
        latency: LatencyModel = ScaledLatency(model.latency, self.prefill_scale, self.decode_scale)
        return replace(model, latency=latency)


def calibrate(run: LiveRun, service: Service) -> Calibration:
    """The corrections with which the profile agrees with this run.

    Both factors are read off the run itself: which prompts were computed together, and how many
    sequences decoded at each moment, is in its times; what the profile says of such steps is set
    against what they took. No queue is simulated for them, so that a busy run does as well.

    Args:
        run: with the five stages, at a rate that the service sustains.
        service: what is believed to run there, by its profile.

    Raises:
        BenchError: too few answers, or a service that does not tell its stages.
    """
    live = run.timeline
    if len(live) < MIN_REQUESTS:
        raise BenchError(
            f"calibration needs {MIN_REQUESTS} answered requests at least, and got {len(live)}"
        )
    if np.isnan(live.prefill_start_s).any():
        raise BenchError("calibration needs the five stages, and this service does not tell them")
    prefill_step_s, prefill_scale = _prefill_line(live, _model(service, Role.PREFILL))
    scaled = Calibration(
        prefill_scale=prefill_scale,
        prefill_step_s=prefill_step_s,
        decode_scale=_decode_scale(live, service),
        arrival_s=_arrival_s(live),
        num_requests=len(live),
    )
    for _ in range(HANDOVER_ROUNDS):
        simulated = simulate(scaled.apply(service), live.requests)
        scaled = _with_handover(scaled, live, simulated)
    return scaled


def _model(service: Service, role: Role) -> LatencyModel:
    """Of the first instance that has this phase to do."""
    return next(i.latency for i in service.instances if i.role in (role, Role.MIXED))


def _num_lanes(service: Service) -> int:
    """Batches that decode beside each other: a pipeline has one for each of its stages."""
    return sum(i.latency.num_stages for i in service.instances if i.role.decodes)


def _pauses(live: Timeline, service: Service) -> list[tuple[float, float]]:
    """When nobody decodes since the only worker computes whole prompts."""
    (first, *others) = service.instances
    if others or first.chunk_tokens is not None or first.latency.num_stages > 1:
        return []
    return [
        (float(live.prefill_start_s[batch[0]]), float(live.prefill_end_s[batch[0]]))
        for batch in prefill_batches(live)
    ]


def _prefill_line(live: Timeline, model: LatencyModel) -> tuple[float, float]:
    """What a step costs by itself, and live over profiled seconds: the line by least squares
    through the batches that were computed. Its mean is theirs, which is what queues depend on."""
    live_s, profiled_s = [], []
    for batch in prefill_batches(live):
        chunks = [Chunk(int(live.requests.input_tokens[k])) for k in batch]
        profiled_s.append(model.num_stages * model.prefill(chunks).seconds)
        live_s.append(float(live.prefill_end_s[batch[0]] - live.prefill_start_s[batch[0]]))
    y, x = np.array(live_s), np.array(profiled_s)
    through_zero = 0.0, float(y.sum() / x.sum())
    if np.ptp(x) == 0.0:
        return through_zero
    slope = float(np.cov(x, y)[0, 1] / x.var(ddof=1))
    step_s = float(y.mean() - slope * x.mean())
    return (step_s, slope) if step_s > 0.0 and slope >= SCALES[0] else through_zero


def prefill_batches(live: Timeline) -> list[list[int]]:
    """Requests that were computed together: the service tells all of them the same duration, and
    their first tokens reach the client within moments of each other."""
    durations_s = live.prefill_end_s - live.prefill_start_s
    batches: list[list[int]] = []
    for k in np.argsort(live.prefill_end_s, kind="stable").tolist():
        last = batches[-1][-1] if batches else None
        if (
            last is not None
            and abs(durations_s[k] - durations_s[last]) < SAME_S
            and live.prefill_end_s[k] - live.prefill_end_s[last] < durations_s[k] / 2
        ):
            batches[-1].append(k)
        else:
            batches.append([k])
    return batches


def _decode_scale(live: Timeline, service: Service) -> float:
    """Live over profiled seconds of a decode step.

    Between two events (a join, a leave, a pause) the batch is what it is. Were steps as profiled, a
    sequence would take `elapsed / step` of them there; the sum over all its intervals, divided by
    the steps that it did take, says how much longer a step was.
    """
    model, num_lanes = _model(service, Role.DECODE), _num_lanes(service)
    pauses = _pauses(live, service)
    decoded = live.requests.output_tokens > 1
    starts, ends = live.decode_start_s[decoded], live.last_token_s[decoded]
    prompts = live.requests.input_tokens[decoded]
    steps = live.requests.output_tokens[decoded] - 1
    edges = np.array(pauses).reshape(-1)
    instants = np.unique(np.concatenate([starts, ends, edges]))
    is_paused = _within(instants[:-1], pauses)
    would_be = 0.0
    for number, (begin_s, end_s) in enumerate(itertools.pairwise(instants.tolist())):
        if is_paused[number]:
            continue
        inside = (starts <= begin_s) & (ends >= end_s)
        if not (batch := int(inside.sum())):
            continue
        done = (begin_s - starts[inside]) / (ends - starts)[inside] * steps[inside]
        context = float((prompts[inside] + done + 1).sum())
        each = max(1, round(batch / num_lanes))
        line = model.decode(each, context * each / batch)
        num_busy = min(model.num_stages, math.ceil(batch / each))
        step_s = model.num_stages * line.seconds(context * each / batch)
        step_s *= decode_pace(model, num_busy)
        would_be += batch * (end_s - begin_s) / step_s
    return would_be / float(steps.sum())


def _within(instants_s: Floats, pauses: Sequence[tuple[float, float]]) -> Bools:
    """For each instant whether it lies in a pause; pauses do not overlap."""
    begins_s, ends_s = (np.sort([pause[end] for pause in pauses]) for end in (0, 1))
    begun, ended = (np.searchsorted(s, instants_s, "right") for s in (begins_s, ends_s))
    return np.asarray(begun > ended)


def _arrival_s(live: Timeline) -> float:
    """On the way to a prefill that had nothing to do: arrivals that met nobody before them."""
    arrival_s, end_s = live.requests.arrival_s, live.prefill_end_s
    met_nobody = arrival_s[1:] >= np.maximum.accumulate(end_s)[:-1]
    waits_s = (live.prefill_start_s - arrival_s)[1:][met_nobody]
    if not len(waits_s):
        raise BenchError("no request found the service idle: calibrate at a lower rate")
    return max(0.0, float(np.median(waits_s)))


def _with_handover(found: Calibration, live: Timeline, simulated: Timeline) -> Calibration:
    """What the decode queue takes beyond the simulated one. Means, since a wait for a step's end
    is anything up to a step; the longest waits are for memory, and cut off."""
    decoded = live.requests.output_tokens > 1
    if not decoded.any():
        return found
    ours_s, theirs_s = (t.stages_s()["decode_queue"][decoded] for t in (simulated, live))
    extra_s = _capped_mean(theirs_s) - _capped_mean(ours_s)
    return msgspec.structs.replace(found, handover_s=max(0.0, found.handover_s + extra_s))


def _capped_mean(values_s: Floats) -> float:
    return float(np.minimum(values_s, np.percentile(values_s, 98)).mean())
