"""Figures 8 and 9 (13 and 14 at 99 %): attainment over the rate and over the SLO scale.

Measured points of three engines beside the same deployments simulated, and what both say of
goodput and of the smallest SLO scale. Nothing is tuned to the curves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.paper_curves import PublishedCurve, published_curves
from planner.report import explained
from planner.report.contents import Cell, Column, Drawing, Line, Origin, Page, Panel, Table
from planner.report.engines import NAMES, engine_setting, num_requests_told, raw_kernels
from planner.report.published import ScaleCurve, experiment, scale_curves
from planner.report.runs import (
    Crossing,
    Setting,
    Swept,
    over_scales,
    smallest_scale,
    until_missed,
)
from planner.report.terms import Terms

FIGURE_8 = (("opt-13b", "sharegpt"), ("opt-66b", "sharegpt"), ("opt-175b", "sharegpt"))
FIGURE_9 = (("opt-66b", "humaneval"), ("opt-66b", "longbench"))


@dataclass(frozen=True)
class Scaled:
    """One engine over SLO scales."""

    measured: ScaleCurve
    simulated: Swept

    @property
    def name(self) -> str:
        return NAMES[self.measured.engine]


@dataclass(frozen=True)
class Compared:
    """One engine of one experiment: what was measured, and what the same deployment gives here."""

    curve: PublishedCurve
    setting: Setting
    by_rate: Swept
    by_scale: Scaled | None

    @property
    def name(self) -> str:
        return NAMES[self.curve.engine]


def figure_8(terms: Terms) -> Page:
    """Chatbot: OPT-13B, 66B and 175B on ShareGPT."""
    return end_to_end_page("fig8", "Figure 8: chatbot on ShareGPT", FIGURE_8, terms)


def figure_9(terms: Terms) -> Page:
    """Code completion and summarisation: OPT-66B on HumanEval and on LongBench."""
    return end_to_end_page("fig9", "Figure 9: HumanEval and LongBench, OPT-66B", FIGURE_9, terms)


def end_to_end_page(
    name: str, title: str, experiments: tuple[tuple[str, str], ...], terms: Terms
) -> Page:
    """Of some experiments."""
    tables: list[Table] = []
    drawings: list[Drawing] = []
    sources = [explained.CURVES, explained.BAND]
    notes: list[str] = []
    for model, workload in experiments:
        engines = _compared(model, workload, terms)
        tables += [_goodput_table(engines, terms), _rate_table(engines)]
        if scaled := [each.by_scale for each in engines if each.by_scale is not None]:
            tables.append(_scale_table(scaled, engines[0].curve, terms))
        drawings.append(_drawing(name, engines, terms))
        sources.append(_told_source(engines, terms))
        notes += explained.experiment_notes(model, workload)
    if terms.percent == 99:
        notes.append(explained.PRINTED_99)
    notes.append(explained.MII)
    return Page(
        name, title, tuple(sources), tuple(tables), tuple(drawings), tuple(dict.fromkeys(notes))
    )


def _compared(model: str, workload: str, terms: Terms) -> list[Compared]:
    scales = scale_curves(model, workload)
    return [
        _one(curve, scales.get(curve.engine), terms)
        for curve in published_curves()
        if (curve.model, curve.workload) == (model, workload)
    ]


def _one(curve: PublishedCurve, scales: ScaleCurve | None, terms: Terms) -> Compared:
    setting = engine_setting(curve)
    rates = [point.per_device_rate for point in curve.points]
    by_rate = until_missed(setting, curve.slo, rates, terms)
    if scales is None:
        return Compared(curve, setting, by_rate, None)
    swept = over_scales(setting, curve.slo, scales.per_device_rate, scales.scales, terms)
    return Compared(curve, setting, by_rate, Scaled(scales, swept))


def _told_source(engines: list[Compared], terms: Terms) -> str:
    curve = engines[0].curve
    known = "; ".join(f"{each.name}: {each.setting.known}" for each in engines)
    return (
        f"{curve.model} {curve.workload}, simulated: {known}; {num_requests_told(curve)}, "
        f"{terms.runs}"
    )


def _goodput_table(engines: list[Compared], terms: Terms) -> Table:
    curve = engines[0].curve
    printed = experiment(curve.model, curve.workload).rate_ratios[terms.percent]
    ours = {each.curve.engine: each.by_rate.crossing(terms.percent) for each in engines}
    rows: list[tuple[Cell, ...]] = []
    for each in engines:
        measured = each.curve.goodput(terms.percent)
        engine = each.curve.engine
        measured_told = f"{measured:.3g}" if measured else f"< {each.by_rate.at[0]:.3g}"
        ratio = _ratio(ours["distserve"].value, ours[engine].value, engine)
        rows.append((each.name, measured_told, ours[engine].told, printed.get(engine), ratio))
        if engine == "vllm" and each.setting.origin is Origin.SIMULATED:
            raw = _raw_goodput(each, terms)
            ratio = _ratio(ours["distserve"].value, raw.value, engine)
            rows.append(("  vLLM, raw kernels", None, raw.told, None, ratio))
    columns = (
        Column("requests/s per GPU"),
        Column("measured"),
        Column("ours (5-95 % of runs)"),
        Column("DistServe's ratio, printed", ".2f"),
        Column("ours", ".2f"),
    )
    title = f"{curve.model} {curve.workload}: goodput at {terms.percent} %, {_told_slo(curve)}"
    return Table(title, columns, tuple(rows))


def _raw_goodput(compared: Compared, terms: Terms) -> Crossing:
    rates = [point.per_device_rate for point in compared.curve.points]
    swept = until_missed(raw_kernels(compared.curve), compared.curve.slo, rates, terms)
    return swept.crossing(terms.percent)


def _rate_table(engines: list[Compared]) -> Table:
    curve = engines[0].curve
    measured = [{p.per_device_rate: p.attainment for p in each.curve.points} for each in engines]
    rows = _side_by_side(measured, [each.by_rate for each in engines])
    columns = (Column("rate/GPU", ".3g"), *_engine_columns(engines))
    return Table(f"{curve.model} {curve.workload}: attainment by rate, %", columns, tuple(rows))


def _scale_table(some: list[Scaled], curve: PublishedCurve, terms: Terms) -> Table:
    """The last row is the smallest scale that reaches the target."""
    measured = [dict(each.measured.points) for each in some]
    rows = _side_by_side(measured, [each.simulated for each in some])
    last: list[Cell] = [f"smallest for {terms.percent} %"]
    for each in some:
        seen = smallest_scale(each.measured.scales, each.measured.percents, terms.percent)
        last += [f"{seen:.3g}" if seen else "none"]
        last += [each.simulated.smallest(terms.percent).told]
    rate = some[0].measured.per_device_rate
    title = f"{curve.model} {curve.workload}: attainment by SLO scale at {rate:g}/GPU, %"
    columns = (Column("scale", ".3g"), *_engine_columns(some))
    return Table(title, columns, (*rows, tuple(last)))


def _side_by_side(
    measured: list[dict[float, float]], simulated: list[Swept]
) -> list[tuple[Cell, ...]]:
    """Along the longest sweep; what was not measured there stays empty."""
    found = [dict(zip(swept.at, swept.spreads, strict=True)) for swept in simulated]
    rows: list[tuple[Cell, ...]] = []
    for at in max((swept.at for swept in simulated), key=len):
        cells: list[Cell] = [at]
        for seen, ours in zip(measured, found, strict=True):
            cells += [seen.get(at), ours[at].told if at in ours else None]
        rows.append(tuple(cells))
    return rows


def _engine_columns(engines: Sequence[Compared | Scaled]) -> list[Column]:
    """The name's last part is short enough for a column."""
    pairs = ((Column(each.name.split("-")[-1], ".1f"), Column("ours")) for each in engines)
    return [column for pair in pairs for column in pair]


def _drawing(page: str, engines: list[Compared], terms: Terms) -> Drawing:
    curve = engines[0].curve
    rate_lines: list[Line] = []
    scale_lines: list[Line] = []
    for each in engines:
        rates = tuple(point.per_device_rate for point in each.curve.points)
        percents = tuple(point.attainment for point in each.curve.points)
        rate_lines.append(Line(each.name, Origin.MEASURED, rates, percents))
        rate_lines.append(each.by_rate.line(each.name, each.setting.origin))
        if each.by_scale is not None:
            seen, found = each.by_scale.measured, each.by_scale.simulated
            scale_lines.append(Line(each.name, Origin.MEASURED, seen.scales, seen.percents))
            scale_lines.append(found.line(each.name, each.setting.origin))
    axis, target = "SLO attainment (%)", float(terms.percent)
    title = f"{curve.model}, {curve.workload}"
    by_rate = Panel(title, "Requests/s per GPU", axis, tuple(rate_lines), target, 102)
    by_scale = Panel(title, "SLO scale", axis, tuple(scale_lines), target, 102, falls=True)
    return Drawing(f"{page}-{curve.model}-{curve.workload}", (by_rate, by_scale))


def _ratio(best: float, other: float, engine: str) -> float | None:
    return best / other if other and engine != "distserve" else None


def _told_slo(curve: PublishedCurve) -> str:
    return f"TTFT {curve.ttft_s:g} s and TPOT {curve.tpot_s:g} s"
