"""The bench's figures: attainment over the rate or, of one run, over the SLO scale."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner import plots
from planner.bench.report import judged
from planner.bench.runs import Run
from planner.bench.sweep import RatePoint
from planner.bench.validation import ValidationReport
from planner.intervals import Interval, share
from planner.slo import Slo
from planner.verdict import margins

_SCALES: list[float] = np.round(np.linspace(0.25, 3.0, 12), 2).tolist()


def draw(path: Path, runs: Sequence[Run], slo: Slo) -> None:
    """What was measured and, dashed, what was simulated."""
    if len(runs) == 1:
        plots.attainment_against_scale(path, _over_scales(runs[0], slo), target=slo.attainment)
        return
    curves = [_curve("measured", [run.point for run in runs])]
    points = [run.simulated_point for run in runs if run.simulated_point is not None]
    if points:
        curves.append(_curve("simulated", points, is_model=True))
    plots.attainment_against_rate(path, curves, target=slo.attainment)


def draw_validation(path: Path, report: ValidationReport) -> None:
    """Both curves of each test workload."""
    curves = []
    for name in dict.fromkeys(trial.workload for trial in report.trials):
        trials = [trial for trial in report.trials if trial.workload == name]
        live = [RatePoint(trial.rate, trial.comparison.live) for trial in trials]
        predicted = [RatePoint(trial.rate, trial.comparison.simulated) for trial in trials]
        curves.append(_curve(f"{name}, measured", live))
        curves.append(_curve(f"{name}, simulated", predicted, is_model=True))
    plots.attainment_against_rate(path, curves, target=report.target)


def _over_scales(run: Run, slo: Slo) -> list[plots.Curve]:
    live = run.live
    of_answered = margins(live.timeline, slo)
    measured = [share(*judged(live, of_answered, scale)) for scale in _SCALES]
    curves = [_curve("measured", _scaled(measured))]
    if run.timeline is not None:
        margin = margins(run.timeline, slo)
        predicted = [share(margin <= scale, margin) for scale in _SCALES]
        curves.append(_curve("simulated", _scaled(predicted), is_model=True))
    return curves


def _scaled(shares: Sequence[Interval]) -> list[RatePoint]:
    return [RatePoint(scale, found) for scale, found in zip(_SCALES, shares, strict=True)]


def _curve(label: str, points: Sequence[RatePoint], *, is_model: bool = False) -> plots.Curve:
    shares = [point.attainment for point in points]
    return plots.Curve(
        label=label,
        at=[point.rate for point in points],
        shares=[found.value for found in shares],
        low=[found.low for found in shares],
        high=[found.high for found in shares],
        is_model=is_model,
    )
