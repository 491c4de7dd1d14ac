"""The bench's report for people: one run in full, or a line for each rate."""

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from planner.bench.report import Distribution, Summary
from planner.bench.sweep import SweepGoodput
from planner.intervals import Interval
from planner.printing import say

_RATE_COLUMNS = (
    "per s",
    "both met",
    "95 %",
    "TTFT met",
    "TPOT met",
    "TTFT P90",
    "TPOT P90",
    "tokens/s",
    "failed",
)


def show_run(summary: Summary, console: Console) -> None:
    """Everything about one run."""
    say(
        console,
        f"{told_load(summary.num_requests, summary.rate)}, "
        f"{summary.num_answered} answered in {summary.duration_s:.1f} s: "
        f"{summary.answers_per_s:.3g} answers, {summary.input_tokens_per_s:.0f} input and "
        f"{summary.output_tokens_per_s:.0f} output tokens per second",
    )
    console.print(latency_table(_latency_rows(summary)), _attainment_table(summary))
    show_warnings(summary, console)


def told_load(num_requests: int, rate: float) -> str:
    """Requests that all come in one instant have no rate."""
    number = f"{num_requests} request{'s' if num_requests > 1 else ''}"
    if rate == math.inf:
        return number if num_requests == 1 else f"{number} all at once"
    return f"{number} at {rate:.4g} per second"


def show_rates(summaries: Sequence[tuple[float, Summary]], console: Console) -> None:
    """One line for each run; what each left to be said comes below."""
    table = Table(
        title="by rate; latencies in ms", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )  # nine columns on a terminal of 80
    for column in _RATE_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for rate, summary in summaries:
        table.add_row(f"{rate:.4g}", *_rate_cells(summary))
    console.print(table)
    for rate, summary in summaries:
        show_warnings(summary, console, f"at {rate:.4g}/s: ")


def show_warnings(summary: Summary, console: Console, where: str = "") -> None:
    """Failures by kind, then whatever qualifies the figures."""
    for kind, failed in summary.failures.items():
        line = f"{where}{failed.count} failed: {kind}, such as: {failed.example}"
        say(console, line, style="red")
    for note in summary.notes:
        say(console, f"{where}{note}", style="yellow")


def told_goodput(found: SweepGoodput, target: float) -> str:
    """In one sentence."""
    if found.rate is None:
        bound = "" if found.high is None else f" (at most {found.high:.3g}, 95 %)"
        return f"goodput: below the lowest rate that was tried{bound}; {target:.0%} are not met"
    low = "below the lowest tried" if found.low is None else f"{found.low:.3g}"
    high = "above the highest tried" if found.high is None else f"{found.high:.3g}"
    least = "" if found.is_bounded else "at least "
    return (
        f"goodput: {least}{found.rate:.3g} requests per second at {target:.0%} attainment "
        f"(95 %: {low} to {high})"
    )


def latency_table(rows: Mapping[str, Distribution | None]) -> Table:
    """Mean and percentiles of each; a dash where nothing is known."""
    table = Table(title="latency, ms")
    table.add_column("")
    for column in ("mean", "P50", "P90", "P99"):
        table.add_column(column, justify="right")
    for name, distribution in rows.items():
        table.add_row(name, *milliseconds(distribution))
    return table


def milliseconds(distribution: Distribution | None) -> tuple[str, ...]:
    """Mean, P50, P90, P99."""
    if distribution is None:
        return ("-",) * 4
    known = (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
    return tuple(f"{1000 * value:.1f}" for value in known)


def _rate_cells(summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.attainment.value:.1%}",
        _range(summary.attainment),
        f"{summary.ttft_attainment.value:.0%}",
        f"{summary.tpot_attainment.value:.0%}",
        milliseconds(summary.latencies.ttft_s)[2],
        milliseconds(summary.latencies.tpot_s)[2],
        f"{summary.output_tokens_per_s:.0f}",
        str(summary.num_requests - summary.num_answered),
    )


def _latency_rows(summary: Summary) -> dict[str, Distribution | None]:
    known = summary.latencies
    return {
        "time to first token": known.ttft_s,
        "time per output token": known.tpot_s,
        "between tokens": summary.inter_token_s,
        "end to end": known.end_to_end_s,
        **{f"stage: {name.replace('_', ' ')}": stage for name, stage in known.stages_s.items()},
        "sent late by": summary.lateness_s,
    }


def _attainment_table(summary: Summary) -> Table:
    table = Table("target", "met by", "95 %", title="attainment")
    rows = {
        "both": summary.attainment,
        f"TTFT <= {1000 * summary.ttft_target_s:g} ms": summary.ttft_attainment,
        f"TPOT <= {1000 * summary.tpot_target_s:g} ms": summary.tpot_attainment,
    }
    for name, share in rows.items():
        table.add_row(name, f"{share.value:.1%}", _range(share))
    return table


def _range(share: Interval) -> str:
    return f"{share.low:.0%} to {share.high:.0%}"
