"""What a running service adds to its profile, read off one live run.

A profile is measured on an idle machine with the engine alone. In service other processes share
its cores and messages take time, so the steps are a little longer and hand-overs are not free.
Four figures say how much: a factor for each phase's steps, and the time a request takes to reach
the prefill queue and the decode queue. They are those with which a simulation of the very same
requests shows the live run's stage times; other runs are then predicted with them.
"""

import msgspec
import numpy as np

from planner.bench.live_run import LiveRun
from planner.errors import BenchError
from planner.latency.interface import LatencyModel
from planner.latency.scaled import ScaledLatency
from planner.simulator.run import simulate
from planner.simulator.service import InstanceModel, Overheads, Service
from planner.simulator.timeline import Timeline
from planner.workload.requests import Floats

NUM_ROUNDS = 8  # each brings the simulated medians closer; the figures settle after four or five
MIN_REQUESTS = 50


class Calibration(msgspec.Struct, frozen=True):
    """Corrections to a profile, fitted to one live run of `num_requests` requests."""

    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    arrival_s: float = 0.0
    handover_s: float = 0.0
    num_requests: int = 0

    def apply(self, service: Service) -> Service:
        """The same service, with steps and hand-overs as they were seen."""
        costs = service.overheads
        return Service(
            instances=tuple(self._corrected(model) for model in service.instances),
            block_size=service.block_size,
            overheads=Overheads(
                arrival_s=costs.arrival_s + self.arrival_s,
                handover_s=costs.handover_s + self.handover_s,
                token_s=costs.token_s,
                prefill_step_s=costs.prefill_step_s,
                decode_step_s=costs.decode_step_s,
                decode_row_s=costs.decode_row_s,
            ),
            shares_link=service.shares_link,
            pull_stalls_decode=service.pull_stalls_decode,
            speculation=service.speculation,
        )

    def _corrected(self, model: InstanceModel) -> InstanceModel:
        latency: LatencyModel = ScaledLatency(model.latency, self.prefill_scale, self.decode_scale)
        return InstanceModel(model.role, latency, model.kv_blocks, model.limits, model.chunk_tokens)


def calibrate(run: LiveRun, service: Service) -> Calibration:
    """The corrections that make a simulation of this run agree with it.

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
    found = Calibration(num_requests=len(live))
    for _ in range(NUM_ROUNDS):
        found = _corrected(found, live, simulate(found.apply(service), live.requests))
    return found


def _corrected(found: Calibration, live: Timeline, simulated: Timeline) -> Calibration:
    """One round: each figure moves by what its own stage is off by."""
    ours, theirs = simulated.stages_s(), live.stages_s()
    idle = ours["prefill_queue"] <= found.arrival_s + 1e-6  # found nobody before it
    queue_s, decode_queue_s = theirs["prefill_queue"], theirs["decode_queue"]
    decoded = live.requests.output_tokens > 1
    return Calibration(
        prefill_scale=found.prefill_scale * _ratio(theirs["prefill"], ours["prefill"]),
        decode_scale=found.decode_scale
        * _ratio(theirs["decode"][decoded], ours["decode"][decoded]),
        arrival_s=max(0.0, found.arrival_s + _median((queue_s - ours["prefill_queue"])[idle])),
        handover_s=max(
            0.0,
            found.handover_s + _median((decode_queue_s - ours["decode_queue"])[decoded]),
        ),
        num_requests=found.num_requests,
    )


def _ratio(live_s: Floats, simulated_s: Floats) -> float:
    """Of sums, so that long stages count for what they are; a thousandth keeps zeros out."""
    return float((live_s.sum() + 1e-3) / (simulated_s.sum() + 1e-3))


def _median(seconds: Floats) -> float:
    return float(np.median(seconds)) if len(seconds) else 0.0
