"""The planner's commands: `distserve simulate` and `distserve bench` run here."""

import sys
from collections.abc import Callable

from planner import simulate_command
from planner.bench import command as bench_command

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "simulate": simulate_command.main,
    "bench": bench_command.main,
}


def main(argv: list[str]) -> int:
    """Exit code: that of the command."""
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
