"""`distserve report paper`: make the pages, print them, draw them.

Exit codes: 0 reported, 2 wrong input, 130 interrupted.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from planner.errors import PlannerError
from planner.report.arguments import read_plan
from planner.report.chapters import CHAPTERS
from planner.report.contents import Page
from planner.report.drawing import draw
from planner.report.options import Plan
from planner.report.show import show
from planner.report.terms import Terms


def main(argv: list[str]) -> int:
    """The command; errors end as one sentence on stderr."""
    try:
        plan = read_plan(argv, CHAPTERS)
        with _progress(len(plan.only)) as (watch, turn):
            pages = list(_pages(plan, watch, turn))
        _report(plan, pages)
    except PlannerError as error:
        sys.stderr.write(f"distserve report: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("distserve report: interrupted\n")
        return 130
    return 0


def _pages(plan: Plan, watch: Callable[[str], None], turn: Callable[[], None]) -> Iterator[Page]:
    for name in plan.only:

        def told(label: str, page: str = name) -> None:
            watch(f"{page}: {label}")

        yield CHAPTERS[name](Terms(plan.percent, plan.num_seeds, watch=told))
        turn()


def _report(plan: Plan, pages: list[Page]) -> None:
    if plan.out is not None:
        for page in pages:
            _save(plan.out, page)
    if plan.is_json:
        text = orjson.dumps(msgspec.to_builtins(pages), option=orjson.OPT_INDENT_2)
        sys.stdout.write(text.decode() + "\n")
        return
    console = Console()
    for page in pages:
        show(page, console)


def _save(directory: Path, page: Page) -> None:
    for drawing in page.drawings:
        draw(directory, drawing)
    path = directory / f"{page.name}.json"
    try:
        path.write_bytes(orjson.dumps(msgspec.to_builtins(page), option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _progress(num_pages: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar over the pages on stderr, where somebody watches."""
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=num_pages)
        yield (
            lambda label: bar.update(task, description=label),
            lambda: bar.advance(task),
        )
