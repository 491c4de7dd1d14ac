import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from planner import plots
from planner.errors import PlannerError

CURVES = [
    plots.Curve("measured", [2, 1, 3], [0.9, 1.0, 0.4], [0.8, 0.9, 0.3], [0.95, 1.0, 0.5]),
    plots.Curve("simulated", [1, 2, 3], [0.99, 0.91, 0.45], is_model=True),
]


def texts(path: Path) -> set[str]:
    """Everything that can be read in a figure."""
    root = ElementTree.parse(path).getroot()
    return {"".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("}text")}


def line_of(path: Path, colour: str) -> list[tuple[float, float]]:
    """Points of the tallest line of that colour, in the figure's units; a legend's are flat."""
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke: ' + colour, path.read_text())
    lines = [re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", line) for line in paths]
    points = [[(float(x), float(y)) for x, y in line] for line in lines]
    return max(points, key=lambda line: np.ptp([y for _, y in line]))


def test_a_curve_names_its_axes_its_runs_and_its_target(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    plots.attainment_against_rate(path, CURVES, target=0.9)
    assert texts(path) >= {
        "Rate (requests per second)",
        "SLO attainment (%)",
        "measured",
        "simulated",
        "target 90%",
    }
    plots.attainment_against_rate(path, CURVES, per_gpu=True)
    assert "Rate (requests per second and GPU)" in texts(path)


def test_a_curve_goes_through_its_points_in_order_of_rate(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    plots.attainment_against_rate(path, CURVES[:1])
    points = line_of(path, "#0072b2")
    rates = np.array([x for x, _ in points])
    shares = -np.array([y for _, y in points])
    assert np.diff(rates) == pytest.approx(np.full(2, rates[1] - rates[0]))
    assert (shares[0] - shares[1]) / (shares[0] - shares[2]) == pytest.approx(0.1 / 0.6, abs=1e-3)


def test_the_same_figures_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        plots.attainment_against_scale(tmp_path / name, CURVES, target=0.9)
    first = (tmp_path / "first.svg").read_bytes()
    assert first == (tmp_path / "second.svg").read_bytes()
    assert b"SLO scale" in first
    assert not re.search(rb"20\d\d-\d\d-\d\d", first)


def test_stage_bars_name_every_run_and_stage(tmp_path: Path) -> None:
    path = tmp_path / "stages.svg"
    runs = {"1 per s": {"prefill": 0.2, "decode": 2.0}, "2 per s": {"prefill_queue": 0.1}}
    plots.stage_bars(path, runs)
    assert texts(path) >= {"1 per s", "2 per s", "prefill", "decode", "prefill queue"}


@pytest.mark.parametrize(
    ("path", "message"),
    [("figure.png", "must end with .svg"), ("none/figure.svg", "cannot be written")],
)
def test_what_cannot_be_written_is_said(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=message):
        plots.attainment_against_rate(tmp_path / path, CURVES)
