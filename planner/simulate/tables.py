"""The prediction for people: what was understood, then a run, a curve, a sweep or the goodput."""

import math

from rich import box
from rich.console import Console
from rich.table import Table

from planner.bench.report import Distribution
from planner.bench.tables import latency_table, milliseconds, told_load
from planner.goodput import Goodput, ScaleSweep
from planner.intervals import Interval
from planner.printing import say
from planner.simulate.outlook import Outlook
from planner.simulate.report import Instances, Prediction, Run
from planner.verdict import RatePoint, Verdict


def show(prediction: Prediction, console: Console) -> None:
    """The whole report."""
    say(console, _headline(prediction))
    for instances in prediction.instances:
        say(console, _told_instances(instances))
    say(console, _told_bounds(prediction.bounds))
    for note in prediction.notes:
        say(console, note, style="yellow")
    if len(prediction.runs) == 1:
        _show_run(prediction, prediction.runs[0], console)
    elif prediction.runs:
        console.print(_curve_table([_run_cells(run) for run in prediction.runs]))
    if prediction.scales is not None:
        _show_scales(prediction.scales, prediction.target, console)
    if prediction.goodput is not None:
        console.print(_curve_table([_point_cells(point) for point in prediction.goodput.points]))
        say(console, told_goodput(prediction.goodput))
    say(console, f"simulated in {prediction.took_s:.1f} s", style="dim")


def told_goodput(found: Goodput) -> str:
    """In one sentence."""
    limit = f"limited by {found.limited_by}"
    if not found.rate.value:
        return f"goodput: none at {found.target:.0%} attainment; {limit}"
    least = "" if found.is_bounded else "at least "
    per_device = found.per_device
    return (
        f"goodput: {least}{found.rate.value:.3g} requests per second at {found.target:.0%} "
        f"attainment (95 %: {_range(found.rate)}), {per_device.value:.3g} per device "
        f"({_range(per_device)}); {limit}"
    )


def _headline(prediction: Prediction) -> str:
    devices = prediction.num_devices
    return (
        f"{prediction.model} on {devices} device{'s' if devices > 1 else ''}, "
        f"{prediction.workload}, up to {prediction.max_total_tokens} tokens a request; "
        f"TTFT <= {1000 * prediction.ttft_target_s:g} ms and "
        f"TPOT <= {1000 * prediction.tpot_target_s:g} ms for {prediction.target:.0%}"
    )


def _told_instances(some: Instances) -> str:
    chunks = f", chunks of {some.chunk_tokens}" if some.chunk_tokens else ""
    chunks += " by vLLM's rules" if some.rules != "ours" else ""
    chunks += ", short prompts first" if some.prefill_policy == "skip-join" else ""
    packed = "" if some.role == "decode" else f", L_m {some.prefill_tokens}{chunks}"
    batch = "" if some.role == "prefill" else f", at most {some.max_batch} sequences"
    ahead = ", two under way" if some.plans_ahead else ""
    return (
        f"  {some.count} {some.role} (tp {some.tp}, pp {some.pp}): {some.kv_tokens} tokens of KV"
        f"{packed}{batch}; step times {' and '.join(some.sources)}{ahead}"
    )


def _told_bounds(bounds: Outlook) -> str:
    return (
        f"  floors: TTFT {1000 * bounds.ttft_floor_s:.4g} ms, "
        f"TPOT {1000 * bounds.tpot_floor_s:.4g} ms; caps, requests per second: "
        f"prefill {bounds.prefill_cap:.3g}, decode {bounds.decode_cap:.3g} "
        f"(batch {bounds.decode_batch}, by {bounds.decode_limit})"
    )


def _show_run(prediction: Prediction, run: Run, console: Console) -> None:
    counted = "" if run.num_counted == run.num_requests else f", {run.num_counted} of them counted"
    say(console, f"{told_load(run.num_requests, run.rate)}{counted}")
    console.print(latency_table(_latency_rows(run)), _attainment_table(prediction, run))
    say(console, _told_verdict(run, prediction.target))
    if run.use is not None:
        busy = run.use.prefill_busy
        told = "" if busy is None else f"prefill busy {busy:.0%}; "
        say(
            console,
            f"{told}{run.use.sequences:.1f} sequences decode at once in an instance, "
            f"{run.use.kv_share:.0%} of its KV in use; {run.num_preemptions} preemptions",
        )


def _told_verdict(run: Run, target: float) -> str:
    if not run.is_stable:
        return (
            f"misses the target: queues grow by {run.queue_growth:.2g} s each second, so these "
            "figures are of the run's beginning and in the long run nobody is in time"
        )
    word = {
        Verdict.MEETS: "meets the target",
        Verdict.MISSES: "misses the target",
        Verdict.UNDECIDED: "too close to the target to tell",
    }[run.verdict]
    return f"{word} of {target:.0%}; smallest scale {run.minimal_scale.value:.3g}"


def _latency_rows(run: Run) -> dict[str, Distribution | None]:
    known = run.latencies
    return {
        "time to first token": known.ttft_s,
        "time per output token": known.tpot_s,
        "end to end": known.end_to_end_s,
        **{f"stage: {name.replace('_', ' ')}": stage for name, stage in known.stages_s.items()},
    }


def _attainment_table(prediction: Prediction, run: Run) -> Table:
    table = Table("target", "met by", "95 %", title="attainment")
    rows = {
        "both": run.attainment,
        f"TTFT <= {1000 * prediction.ttft_target_s:g} ms": run.ttft_attainment,
        f"TPOT <= {1000 * prediction.tpot_target_s:g} ms": run.tpot_attainment,
    }
    for name, share in rows.items():
        table.add_row(name, f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}")
    return table


def _curve_table(rows: list[tuple[str, ...]]) -> Table:
    # Narrow, for terminals of 80 columns.
    table = Table(
        title="by rate; latencies in ms", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    columns = (
        "per s",
        "both met",
        "95 %",
        "TTFT met",
        "TPOT met",
        "TTFT P90",
        "TPOT P90",
        "target",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _run_cells(run: Run) -> tuple[str, ...]:
    known = run.latencies
    return (
        f"{run.rate:.4g}",
        *_shares(run.attainment, run.ttft_attainment.value, run.tpot_attainment.value),
        milliseconds(known.ttft_s)[2],
        milliseconds(known.tpot_s)[2],
        _in_a_word(run.verdict, run.is_stable),
    )


def _point_cells(point: RatePoint) -> tuple[str, ...]:
    return (
        f"{point.rate:.4g}",
        *_shares(point.attainment, point.ttft_attainment, point.tpot_attainment),
        f"{1000 * point.ttft.p90.value:.1f}",
        f"{1000 * point.tpot.p90.value:.1f}",
        _in_a_word(point.verdict, point.is_stable),
    )


def _in_a_word(verdict: Verdict, is_stable: bool) -> str:
    if not is_stable:
        return "unstable"
    return "unclear" if verdict is Verdict.UNDECIDED else str(verdict)


def _shares(both: Interval, ttft: float, tpot: float) -> tuple[str, ...]:
    band = f"{both.low:.0%} to {both.high:.0%}"
    return f"{both.value:.1%}", band, f"{ttft:.0%}", f"{tpot:.0%}"


def _show_scales(sweep: ScaleSweep, target: float, console: Console) -> None:
    table = Table(title=f"by SLO scale, at {sweep.rate:.4g} requests per second")
    for column in ("scale", "both met", "95 %"):
        table.add_column(column, justify="right")
    for point in sweep.points:
        share = point.attainment
        table.add_row(
            f"{point.scale:g}", f"{share.value:.1%}", f"{share.low:.0%} to {share.high:.0%}"
        )
    console.print(table)
    if not sweep.is_stable:
        say(console, "unstable: queues grow without end, so that no scale is met for long")
        return
    least = sweep.minimal_scale
    say(console, f"smallest scale for {target:.0%}: {least.value:.3g} (95 %: {_range(least)})")


def _range(interval: Interval) -> str:
    high = "no end" if math.isinf(interval.high) else f"{interval.high:.3g}"
    return f"{interval.low:.3g} to {high}"
