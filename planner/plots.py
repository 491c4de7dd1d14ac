"""The planner's figures: attainment curves, stage bars, latencies, what a search found, as SVG.

Deterministic: the same figures make the same bytes. Colours are Okabe and Ito's, which stay apart
for every kind of colour vision; markers and line styles differ too.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from planner.errors import PlannerError
from planner.intervals import Interval, share
from planner.workload.requests import Floats, Ints

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "distserve",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_SIZE_INCHES = (6.4, 4.0)
_SCALES: list[float] = np.round(np.linspace(0.25, 3.0, 12), 2).tolist()

Point = tuple[float, Interval]
"""Where it lies, be it a rate or an SLO scale, and the attainment there."""


@dataclass(frozen=True)
class Curve:
    """Shares (0 to 1) over something, with the ends of their intervals where there are some."""

    label: str
    at: Sequence[float]
    shares: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_model: bool = False  # predicted rather than measured: a dashed line

    @classmethod
    def through(cls, label: str, points: Sequence[Point], *, is_model: bool = False) -> "Curve":
        """Each point with its interval."""
        found = [interval for _, interval in points]
        return cls(
            label=label,
            at=[at for at, _ in points],
            shares=[interval.value for interval in found],
            low=[interval.low for interval in found],
            high=[interval.high for interval in found],
            is_model=is_model,
        )


@dataclass(frozen=True)
class Band:
    """A quantity over the rate, with the ends of its intervals; `line` as matplotlib has it."""

    label: str
    at: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    line: str = "-"


@dataclass(frozen=True)
class Spot:
    """A candidate: how many devices it takes and the goodput of each, with its interval.

    `name` is written beside it where there is one; `group` gives colour and marker.
    """

    group: str
    num_devices: int
    per_device: float
    low: float
    high: float
    name: str = ""


def over_scales(margin: Floats) -> list[Point]:
    """The attainment of one run at SLO scales, by each request's smallest one (`margins`)."""
    return [(scale, share(margin <= scale, margin)) for scale in _SCALES]


def attainment_against_rate(
    path: Path, curves: Sequence[Curve], *, target: float | None = None, per_gpu: bool = False
) -> None:
    """SLO attainment over the request rate (the paper's figures 8 and 9, upper rows)."""
    unit = "requests per second and GPU" if per_gpu else "requests per second"
    with _drawn(path) as axes:
        _draw_curves(axes, curves, target)
        axes.set_xlabel(f"Rate ({unit})")
        axes.set_xlim(left=0)


def attainment_against_scale(
    path: Path, curves: Sequence[Curve], *, target: float | None = None
) -> None:
    """SLO attainment over the SLO scale: 1 is the target as given, left of it is stricter."""
    with _drawn(path) as axes:
        _draw_curves(axes, curves, target)
        axes.set_xlabel("SLO scale")
        axes.set_xlim(left=0)


def stage_bars(path: Path, runs: Mapping[str, Mapping[str, float]]) -> None:
    """Mean seconds in each stage, one bar for each run (the paper's figure 10, left)."""
    stages = list(dict.fromkeys(itertools.chain.from_iterable(runs.values())))
    with _drawn(path) as axes:
        left = np.zeros(len(runs))
        for stage, colour in zip(stages, itertools.cycle(COLOURS), strict=False):
            widths = np.array([stages_s.get(stage, 0.0) for stages_s in runs.values()])
            label = stage.replace("_", " ")
            axes.barh(list(runs), widths, left=left, height=0.6, color=colour, label=label)
            left += widths
        axes.set_xlabel("Mean time (s)")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.figure.legend(loc="outside upper center", ncols=max(1, len(stages)), columnspacing=1)


def latencies_against_rate(
    path: Path, bands: Sequence[Band], *, quantity: str, target_s: float | None = None
) -> None:
    """Percentiles of one latency over the rate, each with its interval; `quantity` names it."""
    with _drawn(path) as axes:
        for band, colour, marker in zip(bands, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
            axes.plot(
                band.at, band.values, band.line, color=colour, marker=marker, label=band.label
            )
            axes.fill_between(band.at, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        if target_s is not None:
            axes.axhline(target_s, color=GREY, linestyle=":", label="target")
        axes.set_xlabel("Rate (requests per second)")
        axes.set_ylabel(f"{quantity} (s)")
        axes.set_xlim(left=0)
        axes.set_yscale("log")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(LogFormatter(minor_thresholds=(2, 0.5)))  # 0.3, not 3 x 10^-1
        axes.legend(loc="upper left")


def goodput_against_devices(path: Path, spots: Sequence[Spot]) -> None:
    """Goodput per device over the devices that a candidate takes, and the line of those that no
    smaller one beats (the Pareto front)."""
    groups = dict.fromkeys(spot.group for spot in spots)
    with _drawn(path) as axes:
        for group, colour, marker in zip(
            groups, itertools.cycle(COLOURS), itertools.cycle(MARKERS)
        ):
            some = [spot for spot in spots if spot.group == group]
            _draw_spots(axes, some, marker, colour)
        front = _front(spots)
        at, best = [spot.num_devices for spot in front], [spot.per_device for spot in front]
        axes.step(at, best, ":", where="post", color=GREY, label="best up to so many")
        axes.set_xlabel("Devices")
        axes.set_ylabel("Goodput (requests per second and device)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")


def save(path: Path, figure: Figure) -> None:
    """As SVG, without a date.

    Raises:
        PlannerError: it cannot be written.
    """
    try:
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error.strerror}") from error


def _draw_spots(axes: Axes, spots: Sequence[Spot], marker: str, colour: str) -> None:
    """With error bars, each with its name beside it; an interval without an end has no bar."""
    at = [spot.num_devices for spot in spots]
    values = np.array([spot.per_device for spot in spots])
    ends = np.array([(spot.low, spot.high) for spot in spots]).T
    reach = np.abs(np.where(np.isfinite(ends), ends, values) - values)
    label = spots[0].group
    axes.errorbar(at, values, reach, fmt=marker, color=colour, alpha=0.7, label=label, capsize=2)
    for spot in spots:
        where = (spot.num_devices, spot.per_device)
        axes.annotate(spot.name, where, xytext=(6, 4), textcoords="offset points", fontsize=8)


def _draw_curves(axes: Axes, curves: Sequence[Curve], target: float | None) -> None:
    for curve, colour, marker in zip(curves, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
        order = np.argsort(curve.at)
        at = np.asarray(curve.at)[order]
        line = "--" if curve.is_model else "-"
        axes.plot(
            at, _percent(curve.shares, order), line, color=colour, marker=marker, label=curve.label
        )
        if curve.low is not None and curve.high is not None:
            low, high = _percent(curve.low, order), _percent(curve.high, order)
            axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    if target is not None:
        axes.axhline(100 * target, color=GREY, linestyle=":", label=f"target {target:.0%}")
    axes.set_ylabel("SLO attainment (%)")
    axes.set_ylim(0, 102)
    axes.legend(loc="lower left")


def _front(spots: Sequence[Spot]) -> list[Spot]:
    """By devices, each better than all that take no more."""
    front: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.num_devices, -spot.per_device)):
        if not front or spot.per_device > front[-1].per_device:
            front.append(spot)
    return front


def _percent(shares: Sequence[float], order: Ints) -> Floats:
    ordered: Floats = np.asarray(shares, dtype=np.float64)[order]
    return 100 * ordered


@contextmanager
def _drawn(path: Path) -> Iterator[Axes]:
    """Axes to draw on; the file is written when they are left."""
    if path.suffix.lower() != ".svg":
        raise PlannerError(f"figures are written as SVG: {path} must end with .svg")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        yield figure.add_subplot()
        save(path, figure)
