"""`distserve simulate`: carry out the plan, then report, save and draw what was asked for.

Exit codes: 0 predicted, 2 wrong input, 130 interrupted.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console

from planner import plots
from planner.bench.live_run import LiveRun
from planner.bench.run_file import write_run
from planner.errors import PlannerError
from planner.printing import print_json
from planner.simulate.arguments import read_plan
from planner.simulate.options import Plan
from planner.simulate.predict import Predicted, Watch, predict
from planner.simulate.report import Prediction
from planner.simulate.tables import show
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.verdict import margins


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
        print_json(found.prediction)
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
        scaled = plots.over_scales(margins(found.timeline, slo))
        plots.attainment_against_scale(path, [_curve(scaled)], target=slo.attainment)


def _by_rate(prediction: Prediction) -> list[plots.Point]:
    if prediction.goodput is not None:
        return [(point.rate, point.attainment) for point in prediction.goodput.points]
    return [(run.rate, run.attainment) for run in prediction.runs]


def _curve(points: list[plots.Point]) -> plots.Curve:
    return plots.Curve.through("simulated", points, is_model=True)


@contextmanager
def _progress() -> Iterator[Watch]:
    """What is being simulated, on stderr, where somebody watches."""
    with Console(stderr=True).status("reading") as status:
        yield lambda label: status.update(f"simulating {label}")
