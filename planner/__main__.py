"""The planner's commands: `distserve plan`, `simulate`, `bench` and `report` run here."""

import os
import signal
import sys
from collections.abc import Callable

if __name__ == "__main__":
    # Ctrl-C while the libraries load just ends it: there is nothing to say yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

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
    for word in argv:
        if not _is_text(word):
            print(f"distserve {argv[0]}: {word!r} is not UTF-8", file=sys.stderr)
            return 2
    try:
        code = command(argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"distserve {argv[0]}: {error}", file=sys.stderr)
        return 2
    return code


def _is_text(word: str) -> bool:
    """Reports and files are UTF-8: what is not could be read and never be named."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
