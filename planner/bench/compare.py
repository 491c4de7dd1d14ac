"""Live runs beside the simulation of the same requests: what was predicted, and how far off it is.

Pure. Errors are the simulation's: above zero where it promises more attainment, or longer times,
than there were.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from planner.bench.live_run import LiveRun
from planner.bench.report import judged
from planner.intervals import Interval, paired_difference, share
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.verdict import margins
from planner.workload.requests import Floats, Requests

LEVELS = (50, 90)


class Pair(msgspec.Struct, frozen=True):
    """One figure on both sides; `error` is relative, None where the live one is zero."""

    live_s: float
    simulated_s: float
    error: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One trace, live and simulated.

    Args:
        live: attainment, the mean over the replays; a request that failed missed both targets.
        simulated: of the same requests.
        difference: simulated less live, paired by request.
        replay_spread: between the highest and the lowest attainment of replays of these very
            requests: what no simulation can know. None after a single replay.
        latencies: by name, such as "TTFT P90", of the requests that were answered.
        stages: the mean of each stage, where the service tells them: where an error comes from.
    """

    live: Interval
    simulated: Interval
    difference: Interval
    replay_spread: float | None
    latencies: dict[str, Pair]
    stages: dict[str, Pair]


def simulated(service: Service, live: LiveRun) -> Timeline:
    """What the simulator makes of the requests that were sent."""
    return simulate(service, as_sent(live))


def as_sent(live: LiveRun) -> Requests:
    """With the lengths that the answers really had; as planned where there is no answer."""
    inputs, outputs = live.requests.input_tokens.copy(), live.requests.output_tokens.copy()
    inputs[live.is_answered] = live.timeline.requests.input_tokens
    outputs[live.is_answered] = live.timeline.requests.output_tokens
    return Requests(live.requests.arrival_s, inputs, outputs)


def compare(replays: Sequence[LiveRun], timeline: Timeline, slo: Slo) -> Comparison:
    """Replays of the same requests, and their simulation."""
    each = [judged(live, margins(live.timeline, slo), 1.0) for live in replays]
    shares = [share(*hits_and_signal) for hits_and_signal in each]
    hits = [hit for hit, _ in each]
    margin = margins(timeline, slo)
    live_hits = hits[0] if len(hits) == 1 else np.mean(hits, axis=0)
    return Comparison(
        live=_mean(shares),
        simulated=share(margin <= 1, margin),
        difference=paired_difference(margin <= 1, live_hits),
        replay_spread=_spread(shares),
        latencies=_latencies(replays, timeline),
        stages=_stages(replays, timeline),
    )


def _mean(shares: Sequence[Interval]) -> Interval:
    """Replays share their requests, so that more of them hardly narrow the interval."""
    ends = np.array([(found.value, found.low, found.high) for found in shares]).mean(axis=0)
    return Interval(*ends.tolist())


def _spread(shares: Sequence[Interval]) -> float | None:
    if len(shares) < 2:
        return None
    values = [found.value for found in shares]
    return max(values) - min(values)


def _latencies(replays: Sequence[LiveRun], timeline: Timeline) -> dict[str, Pair]:
    """Over all replays together; each simulated request counts where the live one was answered."""
    pairs: dict[str, Pair] = {}
    has_steps = [live.timeline.requests.output_tokens > 1 for live in replays]
    ttft_s = [(live.timeline.ttft_s, timeline.ttft_s[live.is_answered]) for live in replays]
    tpot_s = [
        (live.timeline.tpot_s[some], timeline.tpot_s[live.is_answered][some])
        for live, some in zip(replays, has_steps, strict=True)
    ]
    for name, both in (("TTFT", ttft_s), ("TPOT", tpot_s)):
        live_s, simulated_s = (np.concatenate(side) for side in zip(*both, strict=True))
        if len(live_s):
            for level in LEVELS:
                sides = (float(np.percentile(side, level)) for side in (live_s, simulated_s))
                pairs[f"{name} P{level}"] = _pair(*sides)
    return pairs


def _stages(replays: Sequence[LiveRun], timeline: Timeline) -> dict[str, Pair]:
    """Of requests with a decode; one of a single token has no more stages than prefill."""
    predicted = timeline.stages_s()
    found: dict[str, Pair] = {}
    for name, simulated_s in predicted.items():
        sides: list[tuple[Floats, Floats]] = []
        for live in replays:
            some = live.timeline.requests.output_tokens > 1
            live_s = live.timeline.stages_s()[name][some]
            sides.append((live_s, simulated_s[live.is_answered][some]))
        both = [np.concatenate(side) for side in zip(*sides, strict=True)]
        if len(both[0]) and not np.isnan(both[0]).any():
            found[name] = _pair(*(float(side.mean()) for side in both))
    return found


def _pair(live: float, predicted: float) -> Pair:
    return Pair(live, predicted, predicted / live - 1 if live > 0 else None)
