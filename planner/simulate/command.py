"""`distserve simulate`: carry out the plan, then report, save and draw what was asked for.

Exit codes: 0 predicted, 2 wrong input, 130 interrupted.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import orjson
from rich.console import Console

from planner import plots
from planner.bench.live_run import LiveRun
from planner.bench.run_file import write_run
from planner.errors import PlannerError
from planner.intervals import Interval, share
from planner.simulate.arguments import read_plan
from planner.simulate.options import Plan
from planner.simulate.predict import Predicted, Watch, predict
from planner.simulate.report import Prediction
from planner.simulate.tables import show
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.verdict import margins

_SCALES = np.round(np.linspace(0.25, 3.0, 12), 2)


def main(argv: list[str]) -> int:
    """The command; errors end as one sentence on stderr."""
    try:
        plan = read_plan(argv)
        with _progress() as watch:
            found = predict(plan, watch)
        _report(plan, found)
    except PlannerError as error:
        sys.stderr.write(f"distserve simulate: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("distserve simulate: interrupted\n")
        return 130
    return 0


def _report(plan: Plan, found: Predicted) -> None:
    if plan.save is not None and found.timeline is not None:
        write_run(plan.save, as_run(found.timeline))
    if plan.plot is not None:
        _plot(plan.plot, found, plan.slo)
    if plan.is_json:
        text = orjson.dumps(msgspec.to_builtins(found.prediction), option=orjson.OPT_INDENT_2)
        sys.stdout.write(text.decode() + "\n")
        return
    show(found.prediction, Console())


def as_run(timeline: Timeline) -> LiveRun:
    """A simulated run in the form of a live one: all sent in time, all answered."""
    requests = timeline.requests
    return LiveRun(
        requests=requests,
        sent_s=requests.arrival_s,
        is_answered=np.ones(len(requests), dtype=np.bool_),
        timeline=timeline,
        failures=(),
        gaps_s=np.empty(0),
        num_events=None,
        is_counted=True,
        duration_s=float(timeline.last_token_s.max()),
    )


def _plot(path: Path, found: Predicted, slo: Slo) -> None:
    prediction = found.prediction
    if prediction.scales is not None:
        scaled = [(point.scale, point.attainment) for point in prediction.scales.points]
        plots.attainment_against_scale(path, [_curve(scaled)], target=slo.attainment)
    elif len(by_rate := _by_rate(prediction)) > 1 or found.timeline is None:
        plots.attainment_against_rate(path, [_curve(by_rate)], target=slo.attainment)
    else:
        scaled = _over_scales(found.timeline, slo)
        plots.attainment_against_scale(path, [_curve(scaled)], target=slo.attainment)


def _by_rate(prediction: Prediction) -> list[tuple[float, Interval]]:
    if prediction.goodput is not None:
        return [(point.rate, point.attainment) for point in prediction.goodput.points]
    return [(run.rate, run.attainment) for run in prediction.runs]


def _over_scales(timeline: Timeline, slo: Slo) -> list[tuple[float, Interval]]:
    signal = margins(timeline, slo)
    return [(scale, share(signal <= scale, signal)) for scale in _SCALES.tolist()]


def _curve(points: list[tuple[float, Interval]]) -> plots.Curve:
    return plots.Curve(
        label="simulated",
        at=[at for at, _ in points],
        shares=[found.value for _, found in points],
        low=[found.low for _, found in points],
        high=[found.high for _, found in points],
        is_model=True,
    )


@contextmanager
def _progress() -> Iterator[Watch]:
    """What is being simulated, on stderr, where somebody watches."""
    with Console(stderr=True).status("reading") as status:
        yield lambda label: status.update(f"simulating {label}")
