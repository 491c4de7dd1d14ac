"""`distserve console`: look at a running daemon and operate it, by a command, a script or a prompt.

With a command it is asked once; with `-f` the commands of a file run until the first that fails;
with neither there is a prompt. The exit codes are `console_errors`'.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable

from daemon import console_parser, console_repl
from daemon.config_errors import reason_of
from daemon.console_client import connected, whereabouts
from daemon.console_errors import INTERRUPTED, UsageError, code_of
from daemon.console_session import Session, make_keys, sit_at_terminal, write_json
from daemon.console_views import JSON_VERSION
from daemon.errors import ExitError
from ipc.run_dir import RunDir


def main(argv: list[str], wait: Callable[[float], None] = time.sleep) -> int:
    """Run `distserve console ...`; `wait` paces `--watch`. The exit code."""
    parser = console_parser.build()
    wants_json = "--json" in argv
    try:
        arguments = parser.parse_args(argv)
        wants_json = arguments.json
        _run(parser, arguments, wait)
    except ExitError as error:
        complain(error, as_json=wants_json)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not try to flush it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def complain(error: ExitError, *, as_json: bool) -> None:
    """One sentence for people; on stdout an object for programs that asked for one."""
    sys.stderr.write(f"distserve: {error}\n")
    if as_json:
        told = {"code": code_of(error), "message": str(error)}
        write_json({"v": JSON_VERSION, "ok": False, "error": told})


def _run(
    parser: console_parser.Parser, arguments: argparse.Namespace, wait: Callable[[float], None]
) -> None:
    if arguments.file is not None and arguments.verb is not None:
        raise UsageError("-f and a command exclude each other")
    if arguments.verb == "keygen":
        return make_keys(arguments)
    socket_path = RunDir(arguments.run_dir).admin_socket
    where = whereabouts(socket_path, arguments.connect, arguments.keys)
    with connected(where) as client:
        if arguments.file is not None:
            session = Session(client, wait=wait, asks=lambda: False)
            _run_script(parser, arguments, session)
        elif arguments.verb is not None:
            Session(client, wait=wait).run(arguments)
        elif sit_at_terminal():
            console_repl.Repl(parser, arguments, Session(client, wait=wait), where).run()
        else:
            raise UsageError("a prompt needs a terminal; name a command, or -f - for a script")


def _run_script(
    parser: console_parser.Parser, arguments: argparse.Namespace, session: Session
) -> None:
    """Raises the first command's error that fails, with its line."""
    for number, line in enumerate(_lines(arguments.file), 1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                session.run(console_parser.parse_line(parser, words, arguments))
        except ExitError as error:
            error.args = (f"line {number}: {error}",)
            raise
        except ValueError as error:  # an open quotation
            raise UsageError(f"line {number}: {error}") from error


def _lines(file: str) -> Iterable[str]:
    if file == "-":
        return sys.stdin
    try:
        with open(file, encoding="utf-8") as script:
            return script.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {reason_of(error)}") from error
