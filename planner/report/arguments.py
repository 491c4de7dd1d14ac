"""The command line of `distserve report`."""

import argparse
from collections.abc import Collection
from pathlib import Path

from planner.arguments import command_parser, count
from planner.errors import PlannerError
from planner.report.options import Plan
from planner.report.words import DESCRIPTION, EPILOG

PERCENTS = (90, 99)
MIN_SEEDS = 2


def read_plan(argv: list[str], pages: Collection[str]) -> Plan:
    """PlannerError says what is wrong with it."""
    parser = command_parser("distserve report", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("what", choices=["paper"], help="the DistServe paper's evaluation")
    add("--only", metavar="NAME,...", help=f"these alone, of {', '.join(pages)}")
    add("--target", type=int, choices=PERCENTS, default=90,
        help="percent of the requests that must meet both targets; default: 90")  # fmt: skip
    add("--seeds", type=count, default=10, metavar="N",
        help="runs for every simulated point, 2 at least; default: 10")  # fmt: skip
    add("--out", type=Path, metavar="DIR",
        help="write drawings (SVG) and each page's figures (JSON) there")  # fmt: skip
    add("--json", action="store_true", help="print all pages as JSON")
    given = parser.parse_args(argv)
    if given.seeds < MIN_SEEDS:
        raise PlannerError(f"--seeds: a range needs at least {MIN_SEEDS} runs, not {given.seeds}")
    return Plan(
        only=_chosen(given, pages),
        percent=given.target,
        num_seeds=given.seeds,
        out=_directory(given.out),
        is_json=given.json,
    )


def _chosen(given: argparse.Namespace, pages: Collection[str]) -> tuple[str, ...]:
    if given.only is None:
        return tuple(pages)
    wanted = [name.strip() for name in given.only.split(",")]
    for name in wanted:
        if name not in pages:
            raise PlannerError(f"--only: there is no page {name!r}: give {', '.join(pages)}")
    return tuple(name for name in pages if name in wanted)


def _directory(path: Path | None) -> Path | None:
    """Made if it is not there, before anything runs for a minute."""
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"--out: {path} cannot be made: {error.strerror}") from error
    return path
