"""Runs parsed commands against one daemon and shows what it answers.

The same for the command line, for scripts and for the prompt. Data goes to stdout, everything else
to stderr; before something is changed, who sits at a terminal is told what would be, and asked.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live

from daemon.admin_commands import Command, GetEvents, Order
from daemon.admin_keys import make_console_keys
from daemon.admin_protocol import Answer, BooksAre, EventsAre, TimelinesAre, WouldDo
from daemon.console_client import ConsoleClient
from daemon.console_commands import command_of
from daemon.console_errors import NotDone, UsageError
from daemon.console_timelines import chrome_json
from daemon.console_top import frame
from daemon.console_views import JSON_VERSION, event_text, picked, plain, tables

_FOLLOW_S = 20.0

Wait = Callable[[float], None]


def sit_at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


class Session:
    """One daemon, and who asks it.

    Args:
        wait: paces what is shown again and again.
        asks: whether somebody is there to be asked.
    """

    def __init__(
        self,
        client: ConsoleClient,
        *,
        wait: Wait = time.sleep,
        asks: Callable[[], bool] = sit_at_terminal,
    ) -> None:
        self.client = client
        self._wait = wait
        self._asks = asks

    def run(self, arguments: argparse.Namespace) -> None:
        """Raises ExitError, or KeyboardInterrupt."""
        match arguments.leaf:
            case "top":
                self._top(arguments)
            case "ping":
                self._again(arguments, lambda: self._ping(arguments))
            case "events" if arguments.follow:
                self._follow(arguments)
            case "trace" if arguments.chrome is not None:
                self._write_chrome(arguments)
            case _:
                self._ask_and_show(arguments, command_of(arguments))

    def _ask_and_show(self, arguments: argparse.Namespace, command: Command) -> None:
        if isinstance(command, Order):
            self._confirm(arguments, command)
            self._show(arguments, self._order(command))
        else:
            self._again(arguments, lambda: self._show(arguments, self.client.ask(command)))

    def _again(self, arguments: argparse.Namespace, show: Callable[[], None]) -> None:
        """Once, or until interrupted; on a terminal, in place."""
        if (every_s := getattr(arguments, "watch", None)) is None:
            return show()
        while True:
            if not arguments.json and sys.stdout.isatty():
                Console().clear()
            show()
            self._wait(every_s)

    def _show(self, arguments: argparse.Namespace, answer: Answer) -> None:
        one = getattr(arguments, "instance", None) if arguments.leaf == "instances" else None
        answer = picked(answer, one)
        if arguments.json:
            write_json(plain(arguments.leaf, answer))
        elif isinstance(answer, EventsAre):
            write_events(answer)
        else:
            write(*tables(arguments.leaf, answer, is_one=one is not None))
        if isinstance(answer, BooksAre) and not all(book.is_sound for book in answer.books):
            raise NotDone("the block books do not agree, or were not answered for")

    # ---- orders -----------------------------------------------------------------------------

    def _order(self, order: Order) -> Answer:
        """Who stops waiting for it does not stop it, and is told so."""
        deadline_s = getattr(order, "deadline_s", None)
        if deadline_s and not order.dry_run:
            sys.stderr.write(f"what is under way may take {deadline_s:g} s\n")
        try:
            return self.client.ask(order)
        except KeyboardInterrupt:
            sys.stderr.write("the daemon goes on with it\n")
            raise

    def _confirm(self, arguments: argparse.Namespace, order: Order) -> None:
        """Raises NotDone: the operator does not want that."""
        if order.dry_run or arguments.yes or not self._asks():
            return
        would = self.client.ask(msgspec.structs.replace(order, dry_run=True))
        assert isinstance(would, WouldDo)
        for sentence in would.sentences:
            sys.stderr.write(f"  {sentence}\n")
        sys.stderr.write("go on? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise NotDone("nothing was done")

    # ---- what goes on -----------------------------------------------------------------------

    def _follow(self, arguments: argparse.Namespace) -> None:
        after: int | None = None
        while True:
            answer = self.client.ask(GetEvents(after, 0.0 if after is None else _FOLLOW_S))
            assert isinstance(answer, EventsAre)
            if answer.num_lost:
                sys.stderr.write(f"{answer.num_lost} events were missed\n")
            if arguments.json:
                for event in answer.events:
                    write_json({"v": JSON_VERSION, "ok": True, **msgspec.to_builtins(event)})
            else:
                write_events(answer)
            after = answer.next_after

    def _top(self, arguments: argparse.Namespace) -> None:
        if arguments.json or not sys.stdout.isatty():
            raise UsageError("top is for terminals; `status --watch --json` is for programs")
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                live.update(Group(*frame(self.client.ask)), refresh=True)
                self._wait(arguments.every)

    def _ping(self, arguments: argparse.Namespace) -> None:
        began_s = time.perf_counter()
        self.client.ask(command_of(arguments))
        took_s = time.perf_counter() - began_s
        if arguments.json:
            write_json({"v": JSON_VERSION, "ok": True, "answered_after_s": took_s})
        else:
            sys.stdout.write(f"answered after {took_s * 1e3:.1f} ms\n")

    def _write_chrome(self, arguments: argparse.Namespace) -> None:
        answer = self.client.ask(command_of(arguments))
        assert isinstance(answer, TimelinesAre)
        if arguments.chrome == "-":
            sys.stdout.write(chrome_json(answer).decode() + "\n")
            return
        try:
            Path(arguments.chrome).write_bytes(chrome_json(answer))
        except OSError as error:
            raise NotDone(f"{arguments.chrome} cannot be written: {error.strerror}") from error
        sys.stderr.write(f"wrote {len(answer.timelines)} requests to {arguments.chrome}\n")


def make_keys(arguments: argparse.Namespace) -> None:
    """`keygen`, which needs no daemon. Raises ConfigError."""
    path = make_console_keys(arguments.directory, arguments.name)
    if arguments.json:
        write_json({"v": JSON_VERSION, "ok": True, "file": str(path)})
    else:
        sys.stdout.write(
            f"wrote {path}, for the console alone; the daemon takes the directory: admin_keys\n"
        )


def write(*shown: RenderableType) -> None:
    Console().print(*shown, sep="\n")


def write_events(answer: EventsAre) -> None:
    """One a line, however long: they are searched as often as they are read."""
    sys.stdout.writelines(event_text(event) + "\n" for event in answer.events)
    sys.stdout.flush()


def write_json(value: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()
