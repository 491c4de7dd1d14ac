"""The plan for people: the recommendation, then what it was chosen from and how sure it is."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from planner.intervals import Interval
from planner.placement.choices import Chosen, Evaluated
from planner.placement.results import Baseline, Found, Sensitivity
from planner.plan.report import Planned
from planner.plan.told import (
    headline,
    told_candidate,
    told_devices,
    told_drop,
    told_dropped,
    told_range,
    told_rate,
)


def show(planned: Planned, console: Console, *, shows_all: bool = False) -> None:
    """The whole report."""
    found = planned.best
    _say(console, headline(found.asked))
    for note in planned.notes:
        _say(console, note, style="yellow")
    console.print()
    _say(console, planned.recommendation, style="bold")
    for line in told_devices(planned.file):
        _say(console, line)
    for other in planned.searches:
        console.print(_placements(other, is_one_of_many=len(planned.searches) > 1))
    if found.baselines:
        console.print(_baselines(found.baselines))
        _say_absent(console, found.baselines)
    if found.sensitivity:
        console.print(_sensitivity(found.sensitivity))
    for other in planned.searches:
        _show_dropped(console, other, shows_all=shows_all)
    _say(console, _told_effort(planned), style="dim")


def _placements(found: Found, *, is_one_of_many: bool) -> Table:
    """One copy of each: how often it is copied is a matter of the rate."""
    title = "placements, one copy of each"
    affinity = f"{found.asked.affinity} affinity: " if is_one_of_many else ""
    table = _table(affinity + title, ("", "placement", "devices", "per s", "per device", "95 %"))
    table.add_column("limited by")
    table.add_row("recommended", *_placed(found.recommended.best), style="bold")
    if _is_beside(found.disaggregated, found):
        table.add_row("disaggregated", *_placed(found.disaggregated.best))  # type: ignore[union-attr]
    for runner_up in found.runner_ups:
        table.add_row("tie" if runner_up.is_tie else "", *_placed(runner_up.evaluated))
    return table


def _is_beside(disaggregated: Chosen | None, found: Found) -> bool:
    """The best disaggregated one where it is not recommended, nor among those that come next."""
    if disaggregated is None:
        return False
    shown = [found.recommended.best, *(each.evaluated for each in found.runner_ups)]
    return disaggregated.best.candidate not in [each.candidate for each in shown]


def _placed(evaluated: Evaluated) -> tuple[str, ...]:
    goodput, rate = evaluated.goodput, evaluated.per_device
    about = "~" if evaluated.is_rough else "" if goodput.is_bounded else ">= "
    return (
        told_candidate(evaluated.candidate),
        str(evaluated.candidate.num_devices),
        f"{about}{goodput.rate.value:.3g}",
        f"{about}{rate.value:.3g}",
        told_range(rate),
        goodput.limited_by,
    )


def _baselines(baselines: Sequence[Baseline]) -> Table:
    """Searched over their shapes as the placements were; the gain is the disaggregated one's."""
    columns = ("baseline", "instance", "per device", "95 %", "gain", "95 %", "attainment gain")
    table = _table("both phases on the same devices", columns)
    for baseline in baselines:
        if baseline.unit is not None:
            table.add_row(baseline.name, *_compared(baseline, baseline.unit))
    return table


def _compared(baseline: Baseline, unit: Evaluated) -> tuple[str, ...]:
    seen = baseline.scaled or unit
    gain = baseline.gain
    return (
        told_candidate(unit.candidate),
        f"{seen.per_device.value:.3g}",
        told_range(seen.per_device),
        "-" if gain is None else f"x {gain.value:.3g}",
        "-" if gain is None else told_range(gain),
        _points(baseline.attainment_gain),
    )


def _say_absent(console: Console, baselines: Sequence[Baseline]) -> None:
    for baseline in baselines:
        if baseline.unit is None:
            _say(console, f"  {baseline.name}: {baseline.reason}")


def _sensitivity(cases: Sequence[Sensitivity]) -> Table:
    table = _table(
        "if the load were different", ("change", "attainment", "95 %", "goodput per device", "")
    )
    for case in cases:
        share = case.attainment
        table.add_row(
            case.change,
            "-" if share is None else f"{share.value:.1%}",
            "-" if share is None else f"{share.low:.1%} to {share.high:.1%}",
            "-" if case.per_device is None else told_rate(case.per_device),
            case.reason or "",
        )
    return table


def _show_dropped(console: Console, found: Found, *, shows_all: bool) -> None:
    if not found.dropped:
        return
    more = "" if shows_all else " (--all lists each)"
    _say(console, f"{len(found.dropped)} candidates were not simulated as a whole{more}:")
    lines = [f"  {told_drop(one)}" for one in found.dropped] if shows_all else None
    for line in lines or told_dropped(found.dropped):
        _say(console, line)


def _told_effort(planned: Planned) -> str:
    simulated = sum(found.num_simulations for found in planned.searches)
    processes = planned.best.num_processes
    whole = sum(len(found.evaluated) for found in planned.searches)
    return (
        f"searched in {planned.took_s:.1f} s: {simulated} simulations on {processes} "
        f"process{'es' if processes > 1 else ''}, {whole} placements simulated as a whole"
    )


def _points(gain: Interval | None) -> str:
    """A difference of shares, in percentage points."""
    if gain is None:
        return "-"
    return f"{100 * gain.value:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        is_words = name in ("", "placement", "baseline", "instance", "change")
        table.add_column(name, justify="left" if is_words else "right")
    return table


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
