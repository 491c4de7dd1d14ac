"""`distserve bench`: run what the plan asks for, save each run's trace, report.

Exit codes: 0 measured, 1 the service failed, 2 wrong input.
"""

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from planner import plots
from planner.bench.arguments import Plan, read_plan
from planner.bench.live_run import LiveRun
from planner.bench.replay import replay
from planner.bench.report import Summary, judged, summarise
from planner.bench.run_file import write_run
from planner.bench.sweep import Goodput, RatePoint, goodput, next_rate
from planner.bench.tables import show_rates, show_run, told_goodput
from planner.errors import BenchError, PlannerError
from planner.intervals import share
from planner.verdict import margins

Watch = Callable[[str, int], Callable[[int], None]]
_SCALES = np.round(np.linspace(0.25, 3.0, 12), 2)


class Measured(msgspec.Struct, frozen=True):
    """One run's figures and where its trace is."""

    rate: float
    trace: str
    summary: Summary


class BenchReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    url: str
    workload: str
    target: float
    runs: list[Measured]
    goodput: Goodput | None


@dataclass(frozen=True, eq=False)
class _Run:
    """A run with its report."""

    measured: Measured
    live: LiveRun

    @property
    def point(self) -> RatePoint:
        return RatePoint(self.measured.rate, self.measured.summary.attainment)


def main(argv: list[str]) -> int:
    """The command; errors end as one sentence on stderr."""
    try:
        plan = read_plan(argv)
        _allow_many_connections()
        runs = asyncio.run(_measured(plan))
        _report(plan, runs)
    except PlannerError as error:
        sys.stderr.write(f"distserve bench: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("distserve bench: interrupted; finished runs are saved\n")
        return 130
    has_failed = any(run.measured.summary.num_answered == 0 for run in runs)
    return 1 if has_failed else 0


async def _measured(plan: Plan) -> list[_Run]:
    _make_folder(plan.save)
    started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    with _progress() as watch:
        return [run async for run in _runs(plan, watch, started)]


async def _runs(plan: Plan, watch: Watch, started: str) -> AsyncIterator[_Run]:
    """All runs of the plan; of a sweep, each depends on those before it."""
    if not plan.is_sweep:
        for rate in plan.rates or (None,):
            yield await _run(plan, rate, watch, started)
        return
    points: list[RatePoint] = []
    while len(points) < plan.max_runs:
        rate = next_rate(points, plan.slo.attainment, start=plan.start or 1.0)
        if rate is None:
            return
        run = await _run(plan, rate, watch, started)
        points.append(run.point)
        yield run


async def _run(plan: Plan, rate: float | None, watch: Watch, started: str) -> _Run:
    requests = plan.requests(rate)
    label = "own times" if rate is None else f"{rate:.4g}/s"
    on_end = watch(label, len(requests))
    live = await replay(plan.url, requests, replace(plan.options, on_end=on_end))
    rate = live.requests.rate if rate is None else rate
    trace = plan.save / f"{started}-rate-{rate:.4g}.csv"
    write_run(trace, live)
    measured = Measured(rate, str(trace), summarise(live, plan.slo))
    return _Run(measured, live)


def _report(plan: Plan, runs: list[_Run]) -> None:
    measured = [run.measured for run in runs]
    points = [run.point for run in runs]
    found = goodput(points, plan.slo.attainment) if len(points) > 1 else None
    if plan.plot is not None:
        _plot(plan, plan.plot, runs)
    if plan.is_json:
        report = BenchReport(plan.url, plan.workload.name, plan.slo.attainment, measured, found)
        text = orjson.dumps(msgspec.to_builtins(report), option=orjson.OPT_INDENT_2)
        sys.stdout.write(text.decode() + "\n")
        return
    console = Console()
    if len(runs) == 1:
        show_run(measured[0].summary, console)
    else:
        show_rates([(run.rate, run.summary) for run in measured], console)
    if found is not None:
        console.print(told_goodput(found, plan.slo.attainment), highlight=False, soft_wrap=True)
    traces = ", ".join(run.trace for run in measured)
    console.print(f"traces: {traces}", highlight=False, markup=False, soft_wrap=True)


def _plot(plan: Plan, path: Path, runs: list[_Run]) -> None:
    target = plan.slo.attainment
    if len(runs) > 1:
        points = [run.point for run in runs]
        curve = _curve([point.rate for point in points], points)
        plots.attainment_against_rate(path, [curve], target=target)
        return
    live = runs[0].live
    scaled = [
        RatePoint(scale, share(*judged(live, margins(live.timeline, plan.slo), scale)))
        for scale in _SCALES.tolist()
    ]
    plots.attainment_against_scale(path, [_curve(_SCALES.tolist(), scaled)], target=target)


def _curve(at: list[float], points: list[RatePoint]) -> plots.Curve:
    shares = [point.attainment for point in points]
    return plots.Curve(
        label="measured",
        at=at,
        shares=[share.value for share in shares],
        low=[share.low for share in shares],
        high=[share.high for share in shares],
    )


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar for each run, on stderr: stdout is the report's."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=2) as progress:

        def watch(label: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(label, total=total)
            return lambda num_ended: progress.update(task, completed=num_ended)

        yield watch


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--save: {path} cannot be made: {error.strerror}") from error


def _allow_many_connections() -> None:
    """Each request under way has one; the usual soft limit of 1,024 files is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
