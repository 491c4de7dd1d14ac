"""`distserve bench`: run what the plan asks for, save each run's trace, report.

Exit codes: 0 measured, 1 the service failed, 2 wrong input.
"""

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from planner.bench.arguments import read_plan
from planner.bench.comparison_tables import show_comparisons, show_validation
from planner.bench.figures import draw, draw_validation
from planner.bench.plan import Plan
from planner.bench.replay import replay
from planner.bench.runs import LiveRuns, Measured, Run, Watch
from planner.bench.sweep import SweepGoodput, SweepPoint, next_rate, sweep_goodput
from planner.bench.tables import show_rates, show_run, told_goodput
from planner.bench.validate import validate
from planner.bench.validation import ValidationReport
from planner.errors import PlannerError
from planner.printing import print_json, say


class BenchReport(msgspec.Struct, frozen=True):
    """What `--json` prints. With --simulate: its options, and the goodput of the same rates."""

    url: str
    workload: str
    target: float
    runs: list[Measured]
    goodput: SweepGoodput | None
    simulate: str | None = None
    simulated_goodput: SweepGoodput | None = None
    notes: list[str] = []


def main(argv: list[str]) -> int:
    """The command; errors end as one sentence on stderr."""
    try:
        plan = read_plan(argv)
        _allow_many_connections()
        return _validate(plan) if plan.validation else _measure(plan)
    except PlannerError as error:
        sys.stderr.write(f"distserve bench: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("distserve bench: interrupted; finished runs are saved\n")
        return 130


def _measure(plan: Plan) -> int:
    runs = asyncio.run(_measured(plan))
    _report(plan, runs)
    return 1 if any(run.measured.summary.num_answered == 0 for run in runs) else 0


def _validate(plan: Plan) -> int:
    report = asyncio.run(_validated(plan))
    if plan.plot is not None:
        draw_validation(plan.plot, report)
    if plan.is_json:
        print_json(report)
    else:
        show_validation(report, Console())
    return 0


async def _measured(plan: Plan) -> list[Run]:
    with _progress() as watch:
        return [run async for run in _runs(plan, _live_runs(plan, watch))]


async def _validated(plan: Plan) -> ValidationReport:
    with _progress() as watch:
        return await validate(plan, _live_runs(plan, watch))


def _live_runs(plan: Plan, watch: Watch) -> LiveRuns:
    send = partial(replay, plan.url)
    return LiveRuns(send, plan.options, plan.slo, folder=plan.save, watch=watch)


async def _runs(plan: Plan, live: LiveRuns) -> AsyncIterator[Run]:
    """All runs of the plan; of a sweep, each depends on those before it."""
    if not plan.is_sweep:
        for rate in plan.rates or (None,):
            yield await _run(plan, live, rate)
        return
    points: list[SweepPoint] = []
    while len(points) < plan.max_runs:
        rate = next_rate(points, plan.slo.attainment, start=plan.start or 1.0)
        if rate is None:
            return
        run = await _run(plan, live, rate)
        points.append(run.point)
        yield run


async def _run(plan: Plan, live: LiveRuns, rate: float | None) -> Run:
    run = await live.run(plan.requests(rate), rate)
    return run.beside(plan.deployed.built.service, plan.slo) if plan.deployed else run


def _report(plan: Plan, runs: list[Run]) -> None:
    if plan.plot is not None:
        draw(plan.plot, runs, plan.slo)
    report = _bench_report(plan, runs)
    if plan.is_json:
        print_json(report)
        return
    _show(report, Console())


def _bench_report(plan: Plan, runs: list[Run]) -> BenchReport:
    simulated = [run.simulated_point for run in runs if run.simulated_point is not None]
    return BenchReport(
        url=plan.url,
        workload=plan.trace.workload.name,
        target=plan.slo.attainment,
        runs=[run.measured for run in runs],
        goodput=_goodput(plan, [run.point for run in runs]),
        simulate=plan.deployed.words if plan.deployed else None,
        simulated_goodput=_goodput(plan, simulated),
        notes=[*plan.deployed.notes] if plan.deployed else [],
    )


def _goodput(plan: Plan, points: list[SweepPoint]) -> SweepGoodput | None:
    return sweep_goodput(points, plan.slo.attainment) if len(points) > 1 else None


def _show(report: BenchReport, console: Console) -> None:
    runs = report.runs
    if len(runs) == 1:
        show_run(runs[0].summary, console)
    else:
        show_rates([(run.rate, run.summary) for run in runs], console)
    compared = [(run.rate, run.comparison) for run in runs if run.comparison is not None]
    if compared:
        show_comparisons(compared, console)
    lines = [*report.notes]
    if report.goodput is not None:
        lines.append(told_goodput(report.goodput, report.target))
    if report.simulated_goodput is not None:
        lines.append(f"simulated {told_goodput(report.simulated_goodput, report.target)}")
    for line in (*lines, f"traces: {', '.join(run.trace for run in runs)}"):
        say(console, line)


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar for each run, on stderr where somebody watches: stdout is the report's."""
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *bar,
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as progress:

        def watch(label: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(label, total=total)
            return lambda num_ended: progress.update(task, completed=num_ended)

        yield watch


def _allow_many_connections() -> None:
    """Each request under way has one; the usual soft limit of 1,024 files is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
