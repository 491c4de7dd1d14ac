"""The figures of a search: the recommendation and the baselines, each at the same rate per device.

Attainment over the rate and over the SLO scale, mean stages, the winner's latencies, and every
simulated candidate by its devices. All systems see the same requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planner import plots
from planner.errors import PlannerError
from planner.goodput import curve, slo_sweep
from planner.intervals import Interval
from planner.placement.choices import Candidate, Evaluated, Problem
from planner.placement.known_shapes import KnownShapes
from planner.placement.options import Options
from planner.simulator.run import simulate
from planner.simulator.timeline import Timeline
from planner.verdict import Effort, Experiment, RatePoint, steady
from planner.workload.requests import Requests

FRACTIONS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)  # of the recommendation's goodput
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
EFFORT = Effort(2_000, 4_000)  # of each point: a figure decides nothing
LEVELS = {"P50": ":", "P90": "-", "P99": "--"}
NAMES = ("attainment-rate", "attainment-scale", "stages", "ttft", "tpot", "candidates")


@dataclass(frozen=True)
class Line:
    """One system of the figures."""

    label: str
    found: Evaluated


@dataclass(frozen=True)
class Pictured:
    """What is drawn: the recommendation first, then those that it is compared with.

    Args:
        others: every other candidate that was simulated.
    """

    systems: tuple[Line, ...]
    others: tuple[Evaluated, ...] = ()

    @property
    def per_device(self) -> float:
        """The rate per device at which all are compared: what the recommendation can do."""
        return self.systems[0].found.per_device.value


class Studio:
    """Simulates what the figures need of one problem's systems."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self._problem = problem
        self._shapes = KnownShapes(problem, options)

    def draw(self, path: Path, pictured: Pictured) -> list[Path]:
        """One SVG, or all of them into a folder; the files that were written.

        Raises:
            PlannerError: they cannot be written.
        """
        if path.suffix.lower() == ".svg":
            self.attainment_over_rate(path, pictured)
            return [path]
        files = [_folder(path) / f"{name}.svg" for name in NAMES]
        over_rate, over_scale, stages, ttft, tpot, candidates = files
        winner = self.attainment_over_rate(over_rate, pictured)
        self.attainment_over_scale(over_scale, pictured)
        self.stages(stages, pictured)
        slo = self._problem.slo
        latencies(ttft, "TTFT", winner, slo.ttft_s)
        latencies(tpot, "TPOT", winner, slo.tpot_s)
        by_devices(candidates, pictured)
        return files

    def attainment_over_rate(self, path: Path, pictured: Pictured) -> tuple[RatePoint, ...]:
        """The paper's figures 8 and 9, upper rows; gives back the recommendation's points."""
        found = [self._points(system, pictured.per_device) for system in pictured.systems]
        curves = [
            _attainments(system, points)
            for system, points in zip(pictured.systems, found, strict=True)
        ]
        target = self._problem.slo.attainment
        plots.attainment_against_rate(path, curves, target=target, per_gpu=True)
        return found[0]

    def attainment_over_scale(self, path: Path, pictured: Pictured) -> None:
        """The paper's figures 8 and 9, lower rows: at one rate per device."""
        curves = []
        for system in pictured.systems:
            rate = pictured.per_device * system.found.candidate.num_devices
            sweep = slo_sweep(self._experiment(system.found.candidate), rate, SCALES)
            found = [(point.scale, point.attainment) for point in sweep.points]
            # Without end a queue has no long-run attainment but zero.
            if not sweep.is_stable:
                found = [(scale, Interval(0.0, 0.0, 0.0)) for scale, _ in found]
            curves.append(plots.Curve.through(system.label, found, is_model=True))
        plots.attainment_against_scale(path, curves, target=self._problem.slo.attainment)

    def stages(self, path: Path, pictured: Pictured) -> None:
        """The paper's figure 10: where the time goes, each system at its own goodput."""
        bars = {}
        for system in pictured.systems:
            if rate := system.found.goodput.rate.value:
                timeline = self._timeline(system.found.candidate, rate)
                counted = steady(timeline).counted
                stages_s = timeline.stages_s().items()
                bars[system.label] = {name: float(s[counted].mean()) for name, s in stages_s}
        plots.stage_bars(path, bars)

    def _points(self, system: Line, per_device: float) -> tuple[RatePoint, ...]:
        candidate = system.found.candidate
        rates = [fraction * per_device * candidate.num_devices for fraction in FRACTIONS]
        return curve(self._experiment(candidate), rates)

    def _timeline(self, candidate: Candidate, rate: float) -> Timeline:
        experiment = self._experiment(candidate)
        return experiment.run(experiment.draw(EFFORT.cap, rate, experiment.seed))

    def _experiment(self, candidate: Candidate) -> Experiment:
        problem = self._problem
        return Experiment(
            run=partial(simulate, self._shapes.unit(candidate), seed=problem.seed),
            draw=self._drawn,
            slo=problem.slo,
            seed=problem.seed,
            effort=EFFORT,
        )

    def _drawn(self, count: int, rate: float, seed: int) -> Requests:
        return self._problem.workload.requests(count, rate, seed)


def latencies(path: Path, quantity: str, points: Sequence[RatePoint], target_s: float) -> None:
    """Percentiles of the recommendation over the rate; unstable ones are left out."""
    stable = [point for point in points if point.is_stable] or list(points[:1])
    bands = []
    for level, line in LEVELS.items():
        found = [getattr(getattr(p, quantity.lower()), level.lower()) for p in stable]
        bands.append(
            plots.Band(
                label=level,
                at=[point.rate for point in stable],
                values=[each.value for each in found],
                low=[each.low for each in found],
                high=[each.high for each in found],
                line=line,
            )
        )
    plots.latencies_against_rate(path, bands, quantity=quantity, target_s=target_s)


def by_devices(path: Path, pictured: Pictured) -> None:
    """Goodput per device of everything that was simulated, over the devices it takes."""
    named = [_spot(system.found, name=system.label) for system in pictured.systems]
    plots.goodput_against_devices(path, [*named, *map(_spot, pictured.others)])


def _spot(found: Evaluated, name: str = "") -> plots.Spot:
    rate = found.per_device
    candidate = found.candidate
    return plots.Spot(
        str(candidate.system), candidate.num_devices, rate.value, rate.low, rate.high, name
    )


def _attainments(system: Line, points: Sequence[RatePoint]) -> plots.Curve:
    devices = system.found.candidate.num_devices
    nothing = Interval(0.0, 0.0, 0.0)
    found = [
        (point.rate / devices, point.attainment if point.is_stable else nothing) for point in points
    ]
    return plots.Curve.through(system.label, found, is_model=True)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"--plot: {path} cannot be made: {error.strerror}") from error
    return path
