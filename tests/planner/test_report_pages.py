from functools import cache

import numpy as np
import pytest

from planner.paper_curves import (
    one_more_run,
    published_curve,
    published_curves,
    simulated_curve,
)
from planner.report.batches import figure_2, figure_3, figure_5
from planner.report.contents import Origin, Page, Panel, Table
from planner.report.end_to_end import end_to_end_page
from planner.report.engines import MII_CHUNK_TOKENS, engine_setting
from planner.report.motivation import goodputs
from planner.report.queues import figure_4
from planner.report.runs import Spread, Swept, over_scales, smallest_scale
from planner.report.stages import figure_10
from planner.report.terms import Terms
from planner.simulator.timeline import Timeline
from planner.verdict import Effort

QUICK = Terms(num_seeds=2)


@cache
def humaneval() -> Page:
    return end_to_end_page("fig9", "HumanEval", (("opt-66b", "humaneval"),), QUICK)


def column(table: Table, name: str, occurrence: int = 0) -> list[object]:
    at = [k for k, each in enumerate(table.columns) if each.name == name][occurrence]
    return [row[at] for row in table.rows]


def panels(page: Page) -> list[Panel]:
    found = [panel for drawing in page.drawings for panel in drawing.panels]
    return [panel for panel in found if isinstance(panel, Panel)]


def test_an_engine_is_run_as_the_published_curves_are() -> None:
    """The same requests and step times as the curves that the planner is checked with."""
    curve = published_curve("opt-13b", "sharegpt", "distserve")
    setting = engine_setting(curve)
    runs = [setting.run(2.5, seed) for seed in (0, 1)]
    ours = [100 * float(run.meets(curve.slo).mean()) for run in runs]
    theirs = {p.per_device_rate: p.mean for p in simulated_curve(curve, (0, 1))}
    assert np.mean(ours) == pytest.approx(theirs[2.5])


def test_what_has_no_coefficients_is_called_a_roofline() -> None:
    for curve in published_curves():
        setting = engine_setting(curve)
        is_roofline = setting.origin is Origin.ROOFLINE
        assert is_roofline == (curve.model == "opt-175b") == (setting.known == "roofline")


def test_mii_prefills_in_chunks() -> None:
    (instance,) = engine_setting(
        published_curve("opt-66b", "sharegpt", "deepspeed")
    ).service.instances
    assert instance.chunk_tokens == MII_CHUNK_TOKENS


def test_a_range_is_where_one_more_run_would_lie() -> None:
    """Of 500 samples of ten normal values, one more value lies within in about 95 of 100."""
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(500):
        *seen, one_more = random.normal(50, 5, 11)
        _, low, high = one_more_run(seen)
        hits += low <= one_more <= high
    assert 0.92 <= hits / 500 <= 0.98


def test_a_range_of_percents_ends_at_a_hundred() -> None:
    found = Spread(*one_more_run([100.0, 98.0]))
    assert found.high == 100.0
    assert found.told == "99.0 ±22"


def test_the_smallest_scale_lies_between_the_scales_around_the_target() -> None:
    assert smallest_scale((2.0, 1.0, 0.5), (100.0, 95.0, 85.0), 90.0) == pytest.approx(0.75)
    assert smallest_scale((2.0, 1.0), (100.0, 95.0), 90.0) == 1.0


def test_a_service_that_misses_the_loosest_scale_has_no_smallest_one() -> None:
    swept = Swept((2.0, 1.0), ((80.0, 82.0), (60.0, 50.0)))
    assert swept.smallest(90).value == 0.0
    assert swept.smallest(90).told == "none"


def test_scales_go_on_until_the_target_is_missed() -> None:
    curve = published_curve("opt-66b", "longbench", "distserve")
    swept = over_scales(engine_setting(curve), curve.slo, 0.25, (2.0, 1.0), QUICK)
    assert swept.at[:2] == (2.0, 1.0)
    assert max(swept.percents[-2]) >= 90 > max(swept.percents[-1])


def test_measured_and_simulated_lines_stand_side_by_side_for_every_engine() -> None:
    for panel in panels(humaneval()):
        found = {(line.label, line.origin) for line in panel.lines}
        for engine in ("DistServe", "vLLM", "DeepSpeed-MII"):
            assert {(engine, Origin.MEASURED), (engine, Origin.SIMULATED)} <= found


def test_the_goodput_table_has_the_authors_ratios_and_ours() -> None:
    table = humaneval().tables[0]
    printed = column(table, "DistServe's ratio, printed")
    assert printed == [None, 5.721, None, 1.589]
    assert column(table, "measured")[:2] == ["1.16", "0.2"]
    ours = str(column(table, "ours (5-95 % of runs)")[0])
    assert 1.2 < float(ours.split()[0]) < 1.8


def test_measured_points_are_where_they_were_measured() -> None:
    """The simulated sweep goes on to higher rates, where the measured columns are empty."""
    table = humaneval().tables[1]
    rates, measured = column(table, "rate/GPU"), column(table, "DistServe")
    curve = published_curve("opt-66b", "humaneval", "distserve")
    seen = [(rate, value) for rate, value in zip(rates, measured, strict=True) if value is not None]
    assert seen == [(p.per_device_rate, p.attainment) for p in curve.points]


def test_a_page_says_why_humaneval_differs_and_what_stands_for_mii() -> None:
    text = " ".join(humaneval().notes)
    assert "vLLM, HumanEval" in text
    assert "DeepSpeed-MII has no published coefficients" in text


def test_at_99_percent_the_printed_ratios_bear_their_caveat() -> None:
    terms = Terms(percent=99, num_seeds=2)
    page = end_to_end_page("fig9", "HumanEval", (("opt-66b", "humaneval"),), terms)
    assert column(page.tables[0], "DistServe's ratio, printed") == [None, 4.0, None, 1.07]
    assert any("98.5 %" in note for note in page.notes)


def test_figure_1_gains_by_disaggregation_as_the_paper_does() -> None:
    """2.1 times there; ours is of another engine, so only the order must be the same."""
    found = goodputs(QUICK, Effort(500, 1_000))
    colocated, split = found["colocated"], found["2 prefill + 1 decode"]
    assert split.per_device.value / colocated.per_device.value > 1.5
    weaker = min(2 * found["prefill alone"].rate.value, found["decode alone"].rate.value)
    assert split.rate.value == pytest.approx(weaker, rel=0.1)


def test_a_prompt_makes_a_decode_step_longer_and_a_long_one_more_so() -> None:
    (table,) = figure_2(QUICK).tables
    for _, alone, short, times_short, long, times_long in table.rows:
        assert isinstance(alone, float)
        assert alone < short < long  # type: ignore[operator]
        assert times_short == pytest.approx(short / alone)  # type: ignore[operator]
        assert times_long == pytest.approx(long / alone)  # type: ignore[operator]


def test_l_m_is_near_the_512_tokens_of_the_paper() -> None:
    (note,) = figure_3(QUICK).notes
    assert "throughput: 560 tokens here, about 512 in the paper" in note


def test_pipelines_leave_the_latency_and_tensor_parallelism_lowers_it() -> None:
    (table,) = figure_5(QUICK).tables
    by_kind = {
        kind: [row for row in table.rows if row[0] == kind] for kind in ("intra-op", "inter-op")
    }
    latencies = [row[2] for row in by_kind["inter-op"]]
    assert latencies == pytest.approx([latencies[0]] * 4)
    falling = [row[2] for row in by_kind["intra-op"]]
    assert falling == sorted(falling, reverse=True)  # type: ignore[type-var]


def test_the_simulator_agrees_with_equations_2_and_3() -> None:
    table = figure_4(QUICK).tables[0]
    for _, inter, inter_simulated, intra, intra_simulated in table.rows:
        assert inter_simulated == pytest.approx(inter, rel=0.06)
        assert intra_simulated == pytest.approx(intra, rel=0.06)


def test_a_breakdown_is_of_the_whole_time_and_hardly_any_of_it_is_transfer() -> None:
    """Less than 0.1 % for OPT-175B (section 6.3)."""
    page = figure_10(QUICK)
    stack = page.drawings[0].panels[0]
    assert not isinstance(stack, Panel)
    simulated = [k for k, bar in enumerate(stack.bars) if "roofline" in bar]
    for k in simulated:
        assert sum(sizes[k] for sizes in stack.parts.values()) == pytest.approx(100)
        assert stack.parts["transfer"][k] < 0.1


def test_most_transfers_take_less_than_thirty_milliseconds() -> None:
    curve = published_curve("opt-175b", "sharegpt", "distserve")
    run: Timeline = engine_setting(curve).run(0.125, 0)
    assert float(np.mean(run.stages_s()["transfer"] < 0.030)) > 0.95
