"""`distserve console`: ask a running daemon for its status, or drain it.

The client's end of the admin console: plain blocking ZeroMQ, one question at a time. Tables are
for people, `--json` is for scripts; data goes to stdout, everything else to stderr. The exit
code says what happened: 0 done, 1 failed, 2 usage, 3 no daemon, 4 not permitted, 5 too late,
6 refused by the node's state, 130 interrupted.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import assert_never

import msgspec
import orjson
import zmq
from rich.console import Console, Group
from rich.live import Live

from daemon import admin_protocol
from daemon.admin_commands import MAX_DEADLINE_S, Drain, GetStatus, Undrain
from daemon.admin_protocol import (
    ADMIN_VERSION,
    BadMessage,
    Done,
    Failed,
    FailureCode,
    Request,
    StatusIs,
)
from daemon.admin_views import Status
from daemon.console_tables import tables_of
from daemon.errors import ExitError, Unreachable
from ipc.run_dir import RunDir, default_run_dir

_CONNECT_S = 1.0
_ANSWER_S = 5.0
_INTERRUPTED = 130
_EXIT_CODES = {
    FailureCode.BAD_REQUEST: 1,
    FailureCode.INTERNAL: 1,
    FailureCode.NOT_PERMITTED: 4,
    FailureCode.TIMEOUT: 5,
    FailureCode.REFUSED: 6,
}


class CommandFailed(ExitError):
    """The daemon did not do what it was asked; the code says why."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = _EXIT_CODES[code]


def main(argv: list[str], wait: Callable[[float], None] = time.sleep) -> int:
    """Run `distserve console ...`; `wait` paces `--watch`."""
    arguments = _parser().parse_args(argv)
    try:
        with connected(RunDir(arguments.run_dir).admin_socket) as console:
            _run(console, arguments, wait)
    except ExitError as error:
        sys.stderr.write(f"distserve: {error}\n")
        if arguments.json:
            _write_json(_error_object(error))
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


class ConsoleClient:
    """Asks the daemon behind one admin socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._call_ids = itertools.count(1)

    def status(self) -> Status:
        answer = self._ask(GetStatus(), _ANSWER_S)
        if not isinstance(answer, StatusIs):
            raise CommandFailed(FailureCode.INTERNAL, "the daemon answered something else")
        return answer.status

    def drain(self, deadline_s: float) -> None:
        """Returns when nothing is left to finish."""
        self._ask(Drain(deadline_s), deadline_s + _ANSWER_S)

    def undrain(self) -> None:
        self._ask(Undrain(), _ANSWER_S)

    def _ask(self, command: GetStatus | Drain | Undrain, timeout_s: float) -> admin_protocol.Answer:
        """Raises Unreachable, or CommandFailed with the daemon's own words."""
        request = Request(ADMIN_VERSION, next(self._call_ids), command)
        if not self._socket.poll(int(_CONNECT_S * 1000), zmq.POLLOUT):
            raise Unreachable("no daemon listens on the admin socket; is it running?")
        self._socket.send(admin_protocol.encode(request))
        answer = self._answer_to(request.call_id, time.monotonic() + timeout_s)
        if isinstance(answer, Failed):
            raise CommandFailed(answer.code, answer.message)
        return answer

    def _answer_to(self, call_id: int, deadline_s: float) -> admin_protocol.Answer:
        while self._socket.poll(max(0, int((deadline_s - time.monotonic()) * 1000))):
            try:
                reply = admin_protocol.read_reply(self._socket.recv())
            except BadMessage as error:
                raise CommandFailed(FailureCode.INTERNAL, f"unreadable answer: {error}") from error
            if reply.call_id in (call_id, None):
                return reply.answer
        return Failed(FailureCode.TIMEOUT, "the daemon did not answer in time")


@contextmanager
def connected(socket_path: Path) -> Iterator[ConsoleClient]:
    """A client of the daemon that listens on that path.

    Raises:
        Unreachable: there is no such socket.
        CommandFailed: it is another user's.
    """
    _check_access(socket_path)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue for a daemon that is gone
        socket.connect(f"ipc://{socket_path}")
        yield ConsoleClient(socket)


def _check_access(socket_path: Path) -> None:
    try:
        socket_path.stat()
        permitted = os.access(socket_path, os.W_OK)
    except PermissionError:
        permitted = False
    except OSError as error:
        raise Unreachable(f"no daemon answers at {socket_path}; is it running?") from error
    if not permitted:
        message = f"{socket_path} is another user's; ask as that user or as root"
        raise CommandFailed(FailureCode.NOT_PERMITTED, message)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distserve console", description="Look at a running daemon, or drain it."
    )
    everywhere = argparse.ArgumentParser(add_help=False)
    everywhere.add_argument(
        "--run-dir",
        type=Path,
        default=default_run_dir(),
        metavar="DIR",
        help="the daemon's run directory [%(default)s]",
    )
    everywhere.add_argument("--json", action="store_true", help="one JSON object a line")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="status|drain|undrain")
    status = verbs.add_parser("status", parents=[everywhere], help="the node and its instances")
    status.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=2.0,
        metavar="S",
        help="again every S seconds [2] until interrupted",
    )
    drain = verbs.add_parser(
        "drain", parents=[everywhere], help="take nothing new, wait until nothing is left"
    )
    drain.add_argument(
        "--deadline",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="how long to wait [%(default)g]; the node stays drained either way",
    )
    verbs.add_parser("undrain", parents=[everywhere], help="take requests again")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_DEADLINE_S:
        raise argparse.ArgumentTypeError("a number of seconds from above 0 to a day")
    return value


def _run(
    console: ConsoleClient, arguments: argparse.Namespace, wait: Callable[[float], None]
) -> None:
    match arguments.verb:
        case "status" if arguments.watch:
            _watch(console, arguments, wait)
        case "status":
            _show(console.status(), arguments.json)
        case "drain":
            sys.stderr.write(f"draining, for {arguments.deadline:g} s at most\n")
            console.drain(arguments.deadline)
            _confirm("drained", arguments.json)
        case "undrain":
            console.undrain()
            _confirm("taking requests", arguments.json)
        case unknown:
            assert_never(unknown)


def _watch(
    console: ConsoleClient, arguments: argparse.Namespace, wait: Callable[[float], None]
) -> None:
    """Show the status again and again; on a terminal, in place."""
    if arguments.json or not sys.stdout.isatty():
        while True:
            _show(console.status(), arguments.json)
            wait(arguments.watch)
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            live.update(Group(*tables_of(console.status())), refresh=True)
            wait(arguments.watch)


def _show(status: Status, as_json: bool) -> None:
    if as_json:
        _write_json({"v": ADMIN_VERSION, "ok": True, **msgspec.to_builtins(status)})
    else:
        Console().print(*tables_of(status), sep="\n")


def _confirm(what: str, as_json: bool) -> None:
    if as_json:
        _write_json({"v": ADMIN_VERSION, "ok": True})
    else:
        sys.stdout.write(f"{what}\n")


def _error_object(error: ExitError) -> dict[str, object]:
    code = error.code if isinstance(error, CommandFailed) else "unreachable"
    return {"v": ADMIN_VERSION, "ok": False, "error": {"code": code, "message": str(error)}}


def _write_json(value: dict[str, object]) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()
