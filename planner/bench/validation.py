"""What a validation says: how far the calibrated simulator is from each test trace, and a verdict.

Pure. A prediction agrees when its attainment is within 2 points of the live one, or within what
two live replays of the same requests differ, and P50 and P90 of TTFT and TPOT within 10 %.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from planner.bench.calibrate import Calibration
from planner.bench.compare import Comparison
from planner.bench.runs import Measured
from planner.bench.sweep import SweepGoodput, SweepPoint, next_rate, sweep_goodput
from planner.intervals import share
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.verdict import margins
from planner.workload.requests import Requests

ALLOWED_POINTS = 0.02
ALLOWED_ERROR = 0.10
_KNEE_PRECISION = 0.01
_ROUNDING = 1e-9


class Judgement(msgspec.Struct, frozen=True):
    """`misses` says what is too far off, each in a few words; none where all agrees."""

    agrees: bool
    allowed_points: float
    misses: list[str]


class Trial(msgspec.Struct, frozen=True):
    """One test trace at one rate: `runs` are live replays of the same requests."""

    workload: str
    rate: float
    runs: list[Measured]
    comparison: Comparison
    verdict: Judgement


class Knee(msgspec.Struct, frozen=True):
    """Goodput of a workload; `error` is the simulation's, None where a knee was not found.
    `is_settled`: the live search ended with rates within 10 % on either side of it."""

    workload: str
    live: SweepGoodput
    simulated: SweepGoodput
    error: float | None
    is_settled: bool


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--validate --json` prints. The calibration's run is compared with its own fit."""

    url: str
    simulate: str
    target: float
    calibration: Calibration
    calibration_file: str
    calibration_run: Measured
    trials: list[Trial]
    knees: list[Knee]
    notes: list[str]


def judge(found: Comparison) -> Judgement:
    """Against what is allowed."""
    allowed = max(ALLOWED_POINTS, found.replay_spread or 0.0)
    misses = []
    if abs(found.difference.value) > allowed + _ROUNDING:
        points = f"{100 * found.difference.value:+.1f} points"
        misses.append(f"attainment {points} ({100 * allowed:.1f} are allowed)")
    for name, pair in found.latencies.items():
        if pair.error is None:
            misses.append(f"{name}, which is zero live")
        elif abs(pair.error) > ALLOWED_ERROR + _ROUNDING:
            misses.append(f"{name} {pair.error:+.1%}")
    return Judgement(not misses, allowed, misses)


def simulated_knee(
    service: Service, requests: Requests, slo: Slo, *, start: float, max_runs: int
) -> SweepGoodput:
    """The search that a live sweep makes, on the same requests, to a finer end."""
    points: list[SweepPoint] = []
    while len(points) < max_runs:
        rate = next_rate(points, slo.attainment, start=start, precision=_KNEE_PRECISION)
        if rate is None:
            break
        margin = margins(simulate(service, requests.stretched(requests.rate / rate)), slo)
        points.append(SweepPoint(rate, share(margin <= 1, margin)))
    return sweep_goodput(points, slo.attainment)


def knee(
    workload: str, points: Sequence[SweepPoint], simulated: SweepGoodput, target: float
) -> Knee:
    """That of the points which were measured, and the simulated one beside it."""
    live, error = sweep_goodput(points, target), None
    is_settled = next_rate(points, target, start=points[0].rate) is None
    if live.rate and simulated.rate and live.is_bounded and simulated.is_bounded:
        error = simulated.rate / live.rate - 1
    return Knee(workload, live, simulated, error, is_settled)


def begins_alike(first: Requests, second: Requests) -> bool:
    """Whether one holds the other's requests: the same lengths in the same rhythm."""
    count = min(len(first), len(second))
    some, others = first.first(count), second.first(count)
    rhythms = []
    for each in (some, others):
        span_s = float(each.arrival_s[-1] - each.arrival_s[0])
        rhythms.append((each.arrival_s - each.arrival_s[0]) / (span_s or 1.0))
    return (
        np.array_equal(some.input_tokens, others.input_tokens)
        and np.array_equal(some.output_tokens, others.output_tokens)
        and np.allclose(*rhythms)
    )


def num_agreeing(trials: Sequence[Trial]) -> int:
    return sum(trial.verdict.agrees for trial in trials)
