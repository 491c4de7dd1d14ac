"""Figure 10: where a request's time goes over the rate (OPT-175B), and how long its pull takes.

As the authors' code has it: each request's share of the five stages, averaged over requests.
"""

import numpy as np

from planner.paper_curves import PublishedCurve, published_curve
from planner.report import explained
from planner.report.contents import Cell, Column, Drawing, Line, Origin, Page, Panel, Stack, Table
from planner.report.engines import engine_setting
from planner.report.published import Breakdown, Stages, stages
from planner.report.runs import Setting
from planner.report.terms import Terms
from planner.simulator.timeline import Timeline
from planner.workload.requests import Floats

STAGES = ("prefill_queue", "prefill", "transfer", "decode_queue", "decode")
MODELS = ("opt-13b", "opt-66b", "opt-175b")
BELOW_S = (0.005, 0.008, 0.015, 0.030, 0.032)
CDF_POINTS = 60


def figure_10(terms: Terms) -> Page:
    """Breakdown of OPT-175B's time, and the transfers of all three models."""
    published = stages()
    ours = [_shares(row, terms) for row in published.breakdown]
    transfers = {model: _transfers_s(model, terms) for model in MODELS}
    return Page(
        "fig10",
        "Figure 10: where the time goes, OPT-175B on ShareGPT",
        (
            "measured: read off the authors' figure by eye, to about 2 points",
            f"simulated: OPT-175B roofline, OPT-13B and OPT-66B distserve-raw; {terms.runs}; "
            "pulls go over the A100's NVLink",
        ),
        (_breakdown_table(published, ours), _transfer_table(published, transfers)),
        (_drawing(published, ours, transfers),),
        (
            explained.experiment_notes("opt-175b", "sharegpt")[0],
            "the authors' engine copies block by block and between decode steps, which may be "
            "the tail of theirs; here a pull is one transfer at the link's rate",
        ),
    )


def _shares(row: Breakdown, terms: Terms) -> dict[str, float]:
    """Percent of a request's time in each stage."""
    setting = engine_setting(_curve("opt-175b"))
    terms.watch(f"stages at {row.per_device_rate:g}")
    runs = [setting.run(row.per_device_rate, seed) for seed in terms.seeds]
    shares = [_mean_shares(run) for run in runs]
    return {stage: float(np.mean([each[stage] for each in shares])) for stage in STAGES}


def _mean_shares(run: Timeline) -> dict[str, float]:
    whole_s = run.last_token_s - run.requests.arrival_s
    return {name: 100 * float((part / whole_s).mean()) for name, part in run.stages_s().items()}


def _transfers_s(model: str, terms: Terms) -> Floats:
    """At the lowest measured rate of the model."""
    curve = _curve(model)
    setting: Setting = engine_setting(curve)
    terms.watch(f"transfers of {model}")
    rate = curve.points[0].per_device_rate
    parts = [setting.run(rate, seed).stages_s()["transfer"] for seed in terms.seeds]
    return np.sort(np.concatenate(parts))


def _curve(model: str) -> PublishedCurve:
    return published_curve(model, "sharegpt", "distserve")


def _breakdown_table(published: Stages, ours: list[dict[str, float]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row, found in zip(published.breakdown, ours, strict=True):
        cells: list[Cell] = [f"{row.per_device_rate:g}"]
        for stage in STAGES:
            cells += [f"{_measured(row, stage):g} / {found[stage]:.2g}"]
        rows.append(tuple(cells))
    columns = (Column("rate/GPU"), *(Column(stage.replace("_", " ")) for stage in STAGES))
    return Table("percent of the time, measured / ours", columns, tuple(rows))


def _transfer_table(published: Stages, transfers: dict[str, Floats]) -> Table:
    measured = dict(published.transfers)
    rows = tuple(
        (
            f"{1000 * limit_s:g}",
            measured.get(limit_s),
            *(100 * float(np.mean(values <= limit_s)) for values in transfers.values()),
        )
        for limit_s in BELOW_S
    )
    columns = (
        Column("ms"),
        Column("opt-175b, measured", ".0f"),
        *(Column(f"{model}, ours", ".1f") for model in transfers),
    )
    return Table("percent of the transfers up to so many ms", columns, rows)


def _drawing(
    published: Stages, ours: list[dict[str, float]], transfers: dict[str, Floats]
) -> Drawing:
    bars: list[str] = []
    parts: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for row, found in zip(published.breakdown, ours, strict=True):
        bars += [f"{row.per_device_rate:g} measured", f"{row.per_device_rate:g} roofline"]
        for stage in STAGES:
            parts[stage] += [_measured(row, stage), found[stage]]
    named = {stage.replace("_", " "): tuple(values) for stage, values in parts.items()}
    stack = Stack("OPT-175B, by requests/s per GPU", "Percent of the time", tuple(bars), named)
    lines = [_cdf(model, values) for model, values in transfers.items()]
    at = tuple(limit_s for limit_s, _ in published.transfers)
    percents = tuple(percent for _, percent in published.transfers)
    lines.append(Line("opt-175b", Origin.MEASURED, at, percents))
    panel = Panel("Transfers", "Seconds", "Percent of requests", tuple(lines), top=101)
    return Drawing("fig10", (stack, panel))


def _cdf(model: str, ordered: Floats) -> Line:
    levels = np.linspace(0, 100, CDF_POINTS)
    at = np.percentile(ordered, levels)
    origin = engine_setting(_curve(model)).origin
    return Line(model, origin, tuple(at.tolist()), tuple(levels.tolist()))


def _measured(row: Breakdown, stage: str) -> float:
    value: float = getattr(row, stage)
    return value
