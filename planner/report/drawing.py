"""Drawings as SVG, panels side by side: measured lines solid, simulated dashed, formulas dotted.

The same page makes the same bytes, in the planner's own look (`plots`). Each label keeps its colour
and marker, whatever the origin.
"""

import itertools
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner.plots import COLOURS, GREY, MARKERS, STYLE, save
from planner.report.contents import Drawing, Line, Origin, Panel, Stack

_STYLE = STYLE | {"font.size": 9, "legend.fontsize": 7}
_PANEL_INCHES = (5.2, 3.8)
_MOST_MARKERS = 30


def draw(directory: Path, drawing: Drawing) -> None:
    """Into `directory`, as `name`.svg."""
    path = directory / f"{drawing.name}.svg"
    width, height = _PANEL_INCHES
    panels = [panel for panel in drawing.panels if isinstance(panel, Stack) or panel.lines]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _draw_stack(axes, panel) if isinstance(panel, Stack) else _draw_lines(axes, panel)
        save(path, figure)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    labels = list(dict.fromkeys(line.label for line in panel.lines))
    looks = dict(zip(labels, itertools.cycle(zip(COLOURS, MARKERS, strict=True)), strict=False))
    for line in panel.lines:
        _draw_line(axes, line, *looks[line.label])
    if panel.target is not None:
        axes.axhline(panel.target, color=GREY, linestyle=":")
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_ylim(0, panel.top)
    if panel.falls:
        axes.invert_xaxis()
    else:
        axes.set_xlim(left=0)
    axes.legend()


def _draw_line(axes: Axes, line: Line, colour: str, marker: str) -> None:
    order = np.argsort(line.at)
    at, values = np.asarray(line.at)[order], np.asarray(line.values)[order]
    style = ":" if line.origin is Origin.FORMULA else "--" if line.origin.is_model else "-"
    look: dict[str, Any] = {"color": colour, "label": f"{line.label}, {line.origin}"}
    if line.origin is not Origin.FORMULA and len(at) <= _MOST_MARKERS:
        face = "none" if line.origin.is_model else colour
        look |= {"marker": marker, "ms": 4, "markerfacecolor": face}
    axes.plot(at, values, style, **look)
    if line.low is not None and line.high is not None:
        low, high = np.asarray(line.low)[order], np.asarray(line.high)[order]
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)


def _draw_stack(axes: Axes, stack: Stack) -> None:
    left = np.zeros(len(stack.bars))
    for (label, sizes), colour in zip(stack.parts.items(), itertools.cycle(COLOURS)):
        axes.barh(stack.bars, sizes, left=left, height=0.6, color=colour, label=label)
        left += np.asarray(sizes)
    axes.set(title=stack.title, xlabel=stack.x_label)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
