"""`distserve plan`: search, place on the nodes, report, save and draw what was asked for.

Exit codes: 0 planned, 2 wrong input or nothing to recommend, 130 interrupted.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from planner.errors import PlannerError
from planner.placement.choices import Candidate, System
from planner.placement.crew import Watch
from planner.placement.file import save
from planner.placement.results import Found
from planner.plan.answer import Answerer
from planner.plan.arguments import read_asked
from planner.plan.figures import Line, Pictured, Studio
from planner.plan.options import Asked, Replanning
from planner.plan.report import as_text, to_json
from planner.plan.tables import show


def main(argv: list[str]) -> int:
    """The command; errors end as one sentence on stderr."""
    try:
        asked = read_asked(argv)
        if asked.replanning is not None:
            _replan(asked, asked.replanning)
        else:
            _plan(asked)
    except PlannerError as error:
        sys.stderr.write(f"distserve plan: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("distserve plan: interrupted\n")
        return 130
    return 0


def _plan(asked: Asked) -> None:
    with _progress() as watch:
        answerer = Answerer(asked, _today(), watch)
        planned = answerer.plan()
    output = asked.output
    if output.out is not None:
        save(output.out, planned.file)
    if output.is_json:
        sys.stdout.write(to_json(planned) + "\n")
    else:
        show(planned, Console(), shows_all=output.shows_all)
    if output.plot is not None:
        assert answerer.problem is not None, "what was planned has a problem"
        _draw(output.plot, Studio(answerer.problem, asked.search), planned.best)


def _replan(asked: Asked, replanning: Replanning) -> None:
    with _progress() as watch:
        outcome, file = Answerer(asked, _today(), watch).replan(replanning)
    if asked.output.out is not None and file is not None:
        save(asked.output.out, file)
    if asked.output.is_json:
        answer = {"verdict": outcome.verdict, "placement": file}
        sys.stdout.write(as_text(answer) + "\n")
    else:
        Console().print(outcome.verdict.told(), highlight=False, markup=False, soft_wrap=True)


def _draw(path: Path, studio: Studio, found: Found) -> None:
    with Console(stderr=True).status("drawing"):
        files = studio.draw(path, pictured(found))
    sys.stderr.write(f"figures: {', '.join(map(str, files))}\n")


def pictured(found: Found) -> Pictured:
    """The recommendation, the best disaggregated placement if it is another one, and each
    baseline; a candidate that is two of them once."""
    compared = [(str(found.best.system), found.recommended.best)]
    if found.disaggregated is not None:
        compared.append((str(System.DISAGGREGATED), found.disaggregated.best))
    compared += [(each.name, each.unit) for each in found.baselines if each.unit is not None]
    lines: dict[Candidate, Line] = {}
    for label, each in compared:
        lines.setdefault(each.candidate, Line(label, each))
    able = [line for line in lines.values() if line.found.per_device.value > 0]
    others = [each for each in found.evaluated if each.candidate not in lines]
    return Pictured(tuple(able), tuple(others))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar for each step of the search, on stderr: stdout is the report's."""
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *bar,
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bars: dict[str, TaskID] = {}

        def watch(what: str, num_done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=num_done, total=total)

        yield watch
