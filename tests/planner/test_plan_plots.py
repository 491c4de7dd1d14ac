"""The figures of a search: what stands on a Pareto front, percentiles over the rate."""

import re
from pathlib import Path

from planner import plots
from tests.planner.test_plots import texts

SPOTS = [
    plots.Spot("disaggregated", 3, 2.0, 1.8, 2.2, name="best"),
    plots.Spot("disaggregated", 2, 1.0, 0.9, 1.1),
    plots.Spot("disaggregated", 4, 1.5, 1.4, 1.6),
    plots.Spot("colocated", 1, 0.5, 0.4, float("inf")),
]


def test_candidates_stand_at_their_devices_by_system_and_the_named_one_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "front.svg"
    plots.goodput_against_devices(path, SPOTS)
    assert texts(path) >= {"disaggregated", "colocated", "best", "Devices", "best up to so many"}


def test_a_larger_candidate_that_is_no_better_is_not_on_the_front(tmp_path: Path) -> None:
    fewer, more = tmp_path / "fewer.svg", tmp_path / "more.svg"
    front = [plots.Spot("all", n, value, value, value) for n, value in ((1, 0.5), (2, 1), (3, 2))]
    plots.goodput_against_devices(fewer, front)
    plots.goodput_against_devices(more, [*front, plots.Spot("all", 3, 1.5, 1.5, 1.5)])
    assert front_line(fewer) == front_line(more)


def front_line(path: Path) -> str:
    """The dotted grey line, in the figure's units; the legend's sample of it is shorter."""
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke-dasharray[^>]*#666666', path.read_text())
    return max(paths, key=len)


def test_percentiles_are_drawn_with_their_target(tmp_path: Path) -> None:
    path = tmp_path / "ttft.svg"
    band = plots.Band("P90", [1, 2], [0.1, 0.3], [0.09, 0.2], [0.11, 0.5])
    plots.latencies_against_rate(path, [band], quantity="TTFT", target_s=0.2)
    assert texts(path) >= {"P90", "target", "TTFT (s)", "Rate (requests per second)"}
