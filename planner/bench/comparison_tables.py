"""Live beside simulated for people: three lines for each trace, then the verdicts and the knees."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from planner.bench.calibrate import Calibration
from planner.bench.compare import Comparison, Pair
from planner.bench.sweep import SweepGoodput
from planner.bench.tables import show_warnings, told_goodput
from planner.bench.validation import (
    ALLOWED_ERROR,
    Knee,
    Trial,
    ValidationReport,
    num_agreeing,
)
from planner.printing import say

_LATENCIES = ("TTFT P50", "TTFT P90", "TPOT P50", "TPOT P90")


def show_comparisons(
    rows: Sequence[tuple[float, Comparison]], console: Console, title: str = "simulated beside live"
) -> None:
    """By rate. Errors are the simulation's."""
    table = Table(
        title=f"{title}; latencies in ms", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("per s", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for column in ("both met", *_LATENCIES):
        table.add_column(column, justify="right", no_wrap=True)
    for rate, found in rows:
        pairs = [found.latencies.get(name) for name in _LATENCIES]
        live, simulated, error = zip(*map(_cells, pairs), strict=True)
        table.add_row(f"{rate:.4g}", "live", f"{found.live.value:.1%}", *live)
        table.add_row("", "simulated", f"{found.simulated.value:.1%}", *simulated)
        table.add_row("", "error", _points(found.difference.value), *error, end_section=True)
    console.print(table)
    for rate, found in rows:
        say(console, _told_difference(rate, found))
        if found.stages:
            say(console, _told_stages(found))


def show_validation(report: ValidationReport, console: Console) -> None:
    """The calibration, each test workload's traces with verdicts, and how many agree."""
    say(console, _told_calibration(report.calibration))
    own = report.calibration_run
    if own.comparison is not None:
        show_comparisons([(own.rate, own.comparison)], console, "the calibration's own run")
    show_warnings(own.summary, console, "calibration: ")
    for name in dict.fromkeys(trial.workload for trial in report.trials):
        trials = [trial for trial in report.trials if trial.workload == name]
        show_comparisons([(t.rate, t.comparison) for t in trials], console, f"tested on {name}")
        for trial in trials:
            _show_verdict(trial, console)
        for knee in report.knees:
            if knee.workload == name:
                _show_knee(knee, report.target, console)
    agreeing, count = num_agreeing(report.trials), len(report.trials)
    say(console, f"{agreeing} of {count} test traces agree", style="bold")
    for note in report.notes:
        say(console, note, style="yellow")
    say(console, f"calibration: {report.calibration_file} (for `distserve simulate --overheads`)")


def told_verdict(trial: Trial) -> str:
    """In one line."""
    verdict = trial.verdict
    if not verdict.agrees:
        return f"at {trial.rate:.4g}/s: does not agree: {', '.join(verdict.misses)}"
    spread = trial.comparison.replay_spread
    replays = "" if spread is None else f"; two replays differ by {100 * spread:.1f}"
    return (
        f"at {trial.rate:.4g}/s: agrees: attainment within {100 * verdict.allowed_points:.1f} "
        f"points{replays}, latencies within {ALLOWED_ERROR:.0%}"
    )


def _show_verdict(trial: Trial, console: Console) -> None:
    say(console, told_verdict(trial), style="green" if trial.verdict.agrees else "red")
    for number, run in enumerate(trial.runs):
        again = f", replay {number}" if number else ""
        show_warnings(run.summary, console, f"at {trial.rate:.4g}/s{again}: ")


def _show_knee(knee: Knee, target: float, console: Console) -> None:
    sides: dict[str, SweepGoodput] = {"live": knee.live, "simulated": knee.simulated}
    for side, found in sides.items():
        say(console, f"{side}: {told_goodput(found, target)}")
    if not knee.is_settled:
        say(console, "the live search is not at its end: more --max-runs", style="yellow")
    if knee.error is not None:
        say(console, f"the knee is simulated {knee.error:+.1%} from where it lies live")


def _told_calibration(found: Calibration) -> str:
    return (
        f"calibrated on {found.num_requests} requests: prefill steps take "
        f"{found.prefill_scale:.3f} and decode steps {found.decode_scale:.3f} times the profile's; "
        f"on the way in "
        f"{1000 * found.arrival_s:.1f} ms, to decode {1000 * found.handover_s:.1f} ms more"
    )


def _told_difference(rate: float, found: Comparison) -> str:
    difference = found.difference
    low, high = (100 * end for end in (difference.low, difference.high))
    spread = ""
    if found.replay_spread is not None:
        spread = f"; live replays differ by {100 * found.replay_spread:.1f}"
    return (
        f"at {rate:.4g}/s: simulated less live {_points(difference.value)} points "
        f"(95 %: {low:+.1f} to {high:+.1f}){spread}"
    )


def _told_stages(found: Comparison) -> str:
    stages = ", ".join(
        f"{name.replace('_', ' ')} {1000 * pair.live_s:.1f} / {1000 * pair.simulated_s:.1f}"
        for name, pair in found.stages.items()
    )
    return f"  mean ms of each stage, live / simulated: {stages}"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _cells(pair: Pair | None) -> tuple[str, str, str]:
    """Live, simulated, error."""
    if pair is None:
        return "-", "-", "-"
    error = "-" if pair.error is None else f"{pair.error:+.1%}"
    return f"{1000 * pair.live_s:.1f}", f"{1000 * pair.simulated_s:.1f}", error
