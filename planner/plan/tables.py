"""The plan for people: the recommendation, then what it was chosen from and how sure it is."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from planner.placement.choices import Evaluated
from planner.placement.results import Baseline, Found, Sensitivity
from planner.plan.report import Planned
from planner.plan.told import (
    headline,
    short_candidate,
    told_devices,
    told_drop,
    told_dropped,
    told_range,
    told_rate,
)

NUM_RUNNER_UPS = 8  # shown without --all
WORDS = ("", "placement, tp x pp", "baseline", "change", "limit")  # columns that may wrap


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
        is_one_of_many = len(planned.searches) > 1
        console.print(_placements(other, is_one_of_many=is_one_of_many, shows_all=shows_all))
    if found.baselines:
        console.print(_baselines(found.baselines))
        _say_absent(console, found.baselines)
    if found.sensitivity:
        console.print(_sensitivity(found.sensitivity))
    for other in planned.searches:
        _show_dropped(console, other, shows_all=shows_all)
    _say(console, _told_effort(planned), style="dim")


def _placements(found: Found, *, is_one_of_many: bool, shows_all: bool) -> Table:
    """One copy of each: how often it is copied is a matter of the rate."""
    affinity = f"{found.asked.affinity} affinity: " if is_one_of_many else ""
    columns = ("", "placement, tp x pp", "devices", "per s", "per device (95 %)", "limit")
    table = _table(f"{affinity}placements, one copy of each", columns)
    table.add_row("best", *_placed(found.recommended.best), style="bold")
    if (apart := _beside(found)) is not None:
        table.add_row("", *_placed(apart))
    runner_ups = found.runner_ups if shows_all else found.runner_ups[:NUM_RUNNER_UPS]
    for runner_up in runner_ups:
        table.add_row("tie" if runner_up.is_tie else "", *_placed(runner_up.evaluated))
    return table


def _beside(found: Found) -> Evaluated | None:
    """The best disaggregated placement where it would not be shown otherwise."""
    apart = found.disaggregated
    shown = [each.evaluated.candidate for each in found.runner_ups[:NUM_RUNNER_UPS]]
    if apart is None or apart.best.candidate in [found.best, *shown]:
        return None
    return apart.best


def _placed(evaluated: Evaluated) -> tuple[str, ...]:
    """A first look's figures bear a tilde: those are of short runs."""
    goodput, rate = evaluated.goodput, evaluated.per_device
    about = "~" if evaluated.is_rough else "" if goodput.is_bounded else ">="
    return (
        short_candidate(evaluated.candidate),
        str(evaluated.candidate.num_devices),
        f"{about}{goodput.rate.value:.3g}",
        f"{about}{rate.value:.3g} ({told_range(rate)})",
        goodput.limited_by.partition(":")[0],
    )


def _baselines(baselines: Sequence[Baseline]) -> Table:
    """Searched over their shapes as the placements were; the gain is the disaggregated one's."""
    title = "both phases on the same devices, and what disaggregation gains over them"
    table = _table(title, ("baseline", "per device (95 %)", "gain (95 %)"))
    for baseline in baselines:
        if baseline.unit is not None:
            table.add_row(*_compared(baseline, baseline.unit))
    return table


def _compared(baseline: Baseline, unit: Evaluated) -> tuple[str, ...]:
    """Its shape and the gain in attainment are below its name and the gain in goodput."""
    seen = baseline.scaled or unit
    gain = "-"
    if baseline.gain is not None:
        gain = f"x {told_rate(baseline.gain)}"
    if (points := baseline.attainment_gain) is not None:
        low, high = f"{100 * points.low:+.1f}", f"{100 * points.high:+.1f}"
        gain += f"\n{100 * points.value:+.1f} points ({low} to {high})"
    name = f"{baseline.name}\n  {short_candidate(seen.candidate)}"
    return name, told_rate(seen.per_device, seen.goodput.is_bounded), gain


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


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.pad_edge = False
    for name in columns:
        is_words = name in WORDS
        table.add_column(name, justify="left" if is_words else "right", no_wrap=not is_words)
    return table


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
