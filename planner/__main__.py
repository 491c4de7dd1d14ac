"""The planner's commands: `distserve plan`, `simulate`, `bench` and `report` run here."""

import sys
from collections.abc import Callable

from planner.bench import command as bench_command
from planner.plan import command as plan_command
from planner.report import command as report_command
from planner.simulate import command as simulate_command

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": plan_command.main,
    "simulate": simulate_command.main,
    "bench": bench_command.main,
    "report": report_command.main,
}


def main(argv: list[str]) -> int:
    """Exit code: that of the command, or 2 where there is none."""
    known = " or ".join(COMMANDS)
    if not argv:
        print(f"distserve planner: give a command: {known}", file=sys.stderr)
        return 2
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"distserve planner: no command {argv[0]!r}: give {known}", file=sys.stderr)
        return 2
    return command(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
