"""The bench's figures: attainment over the rate or, of one run, over the SLO scale."""

from collections.abc import Sequence
from pathlib import Path

from planner import plots
from planner.bench.report import judged
from planner.bench.runs import Run
from planner.bench.validation import ValidationReport
from planner.slo import Slo
from planner.verdict import margins


def draw(path: Path, runs: Sequence[Run], slo: Slo) -> None:
    """What was measured and, dashed, what was simulated."""
    if len(runs) == 1:
        plots.attainment_against_scale(path, _over_scales(runs[0], slo), target=slo.attainment)
        return
    measured = [run.point for run in runs]
    simulated = [run.simulated_point for run in runs if run.simulated_point is not None]
    curves = [plots.Curve.through("measured", [(p.rate, p.attainment) for p in measured])]
    if simulated:
        points = [(point.rate, point.attainment) for point in simulated]
        curves.append(plots.Curve.through("simulated", points, is_model=True))
    plots.attainment_against_rate(path, curves, target=slo.attainment)


def draw_validation(path: Path, report: ValidationReport) -> None:
    """Both curves of each test workload."""
    curves = []
    for name in dict.fromkeys(trial.workload for trial in report.trials):
        trials = [trial for trial in report.trials if trial.workload == name]
        live = [(trial.rate, trial.comparison.live) for trial in trials]
        simulated = [(trial.rate, trial.comparison.simulated) for trial in trials]
        curves.append(plots.Curve.through(f"{name}, measured", live))
        curves.append(plots.Curve.through(f"{name}, simulated", simulated, is_model=True))
    plots.attainment_against_rate(path, curves, target=report.target)


def _over_scales(run: Run, slo: Slo) -> list[plots.Curve]:
    _, measured = judged(run.live, margins(run.live.timeline, slo), 1.0)
    curves = [plots.Curve.through("measured", plots.over_scales(measured))]
    if run.timeline is not None:
        simulated = plots.over_scales(margins(run.timeline, slo))
        curves.append(plots.Curve.through("simulated", simulated, is_model=True))
    return curves
