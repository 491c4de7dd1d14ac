import csv
from collections import defaultdict

import pytest

from planner.paper_curves import published_curve, published_curves
from planner.report import published
from planner.report.runs import smallest_scale
from tests.planner.reference_data import reference_file

EXPERIMENTS = sorted({(c.model, c.workload) for c in published_curves()})


@pytest.mark.parametrize(("model", "workload"), EXPERIMENTS)
def test_goodput_read_off_the_curves_is_what_the_authors_ratios_say(
    model: str, workload: str
) -> None:
    """4.24 = 0.53 / 0.125, and so on: to 2 % of the reading of curves."""
    printed = published.experiment(model, workload).rate_ratios[90]
    ours = published_curve(model, workload, "distserve").goodput()
    for engine, ratio in printed.items():
        theirs = published_curve(model, workload, engine).goodput()
        assert ours / theirs == pytest.approx(ratio, rel=0.03), engine


@pytest.mark.parametrize(("model", "workload"), EXPERIMENTS)
def test_the_smallest_scale_read_off_the_sweeps_is_the_published_one(
    model: str, workload: str
) -> None:
    found = published.experiment(model, workload)
    for engine, curve in published.scale_curves(model, workload).items():
        ours = smallest_scale(curve.scales, curve.percents, 90.0)
        assert ours == pytest.approx(found.minimal_scale[engine], rel=0.02), engine


@pytest.mark.parametrize(("model", "workload"), EXPERIMENTS)
def test_scale_ratios_are_those_of_the_smallest_scales(model: str, workload: str) -> None:
    found = published.experiment(model, workload)
    for engine, ratio in found.scale_ratios[90].items():
        least = found.minimal_scale
        assert least[engine] / least["distserve"] == pytest.approx(ratio, rel=0.02), engine


def test_a_scale_of_one_is_the_attainment_at_that_rate() -> None:
    """Both panels show it, so that one checks the other, to their reading of a point each."""
    num_checked = 0
    for model, workload in EXPERIMENTS:
        for engine, scaled in published.scale_curves(model, workload).items():
            by_rate = published_curve(model, workload, engine)
            seen = {p.per_device_rate: p.attainment for p in by_rate.points}
            unscaled = dict(scaled.points).get(1.0)
            if unscaled is not None and scaled.per_device_rate in seen:
                assert unscaled == pytest.approx(seen[scaled.per_device_rate], abs=2.0), engine
                num_checked += 1
    assert num_checked >= 9


def test_curves_are_those_of_the_raw_data() -> None:
    raw: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    path = reference_file("distserve_measured_attainment.csv")
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            point = (float(row["per_gpu_rate_rps"]), float(row["attainment_pct"]))
            raw[row["experiment"], row["engine"]].append(point)
    for curve in published_curves():
        points = [(p.per_device_rate, p.attainment) for p in curve.points]
        found = raw[f"{curve.model}-{curve.workload}", curve.engine]
        assert points == found, (curve.model, curve.workload, curve.engine)


def test_placements_take_as_many_devices_as_the_paper_says() -> None:
    devices = [
        row.prefill_tp * row.prefill_pp + row.decode_tp * row.decode_pp
        for row in published.placement_rows()
    ]
    assert devices == [3, 8, 8, 8, 21]


def test_the_papers_simulator_is_within_two_points_of_its_runs() -> None:
    """Section 6.4: less than 2 %."""
    rows = published.accuracy_rows()
    assert [row.per_device_rate for row in rows] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    for row in rows:
        assert abs(row.vllm_real - row.vllm_simulated) < 2
        assert abs(row.distserve_real - row.distserve_simulated) < 2


def test_a_breakdown_is_of_the_whole_time() -> None:
    """Read by eye, to two points."""
    for row in published.stages().breakdown:
        parts = (row.prefill_queue, row.prefill, row.transfer, row.decode_queue, row.decode)
        assert sum(parts) == pytest.approx(100, abs=2)


def test_figure_1_multiplies_up() -> None:
    """Two prefill and one decode instance carry what the weaker side does."""
    found = published.motivation()
    carried = min(2 * found.prefill_alone, found.decode_alone) / 3
    assert carried == pytest.approx(found.disaggregated_per_device, abs=0.05)
    assert carried / found.colocated == pytest.approx(found.ratio, abs=0.05)
