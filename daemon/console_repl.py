"""The console's prompt: completion, history, help, and word of the daemon's comings and goings.

Ctrl-C ends what runs and not the prompt; Ctrl-D and `quit` end the prompt. Each line is parsed by
the same tree as a command line.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.patch_stdout import patch_stdout

from daemon.admin_commands import GetRequests, GetStatus
from daemon.admin_protocol import RequestsAre, StatusIs
from daemon.console_client import Whereabouts
from daemon.console_completion import candidates
from daemon.console_parser import Parser, parse_line
from daemon.console_session import Session
from daemon.console_watch import DaemonWatch
from daemon.errors import ExitError

_QUIT = ("quit", "exit")
_HELP = ("help", "?")
_LOST = "lost"
_LOOK_S = 0.5  # how long the prompt, or a completion, may wait for the daemon
_FRESH_S = 1.0  # how long fetched names are good for


class Repl:
    """One prompt, until it is left."""

    def __init__(
        self, parser: Parser, arguments: argparse.Namespace, session: Session, where: Whereabouts
    ) -> None:
        self._parser = parser
        self._arguments = arguments
        self._session = session
        self._where = where
        self._prompt = "distserve> "
        self._line: PromptSession[str] = PromptSession(
            history=_history(),
            completer=_Words(parser, LiveNames(session)),
            complete_while_typing=False,
        )

    def run(self) -> None:
        """Raises ExitError: there is no daemon to begin with."""
        self._look(self._session.client.ask(GetStatus()))
        with DaemonWatch(self._where, self._moved):
            while (line := self._read()) is not None and line.strip() not in _QUIT:
                self._act(line)

    def _read(self) -> str | None:
        """The next line; None at the end."""
        while True:
            self._look_again()
            try:
                with patch_stdout():
                    return self._line.prompt(lambda: self._prompt)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    def _act(self, line: str) -> None:
        try:
            words = shlex.split(line)
            if not words:
                return
            if words[0] in _HELP:
                words = [*words[1:], "--help"]
            self._session.run(parse_line(self._parser, words, self._arguments))
        except (ExitError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
        except KeyboardInterrupt:
            sys.stderr.write("\n")
        except SystemExit:  # argparse, after its help
            return

    def _look_again(self) -> None:
        try:
            self._look(self._session.client.ask(GetStatus(), _LOOK_S))
        except ExitError:
            self._prompt = f"distserve[{_LOST}]> "

    def _look(self, answer: object) -> None:
        if isinstance(answer, StatusIs):
            self._prompt = f"{answer.status.model}[{answer.status.state}]> "

    def _moved(self, is_there: bool, answer: StatusIs | None) -> None:
        """The daemon went, or came back; called by the watch's thread."""
        if is_there:
            self._look(answer)
            sys.stderr.write("the daemon is back\n")
        else:
            self._prompt = f"distserve[{_LOST}]> "
            sys.stderr.write("lost the daemon; waiting for it to come back\n")
        self._line.app.invalidate()


class LiveNames:
    """Names to complete with, as the daemon knows them now, or did a moment ago."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, tuple[float, list[str]]] = {}

    def __call__(self, kind: str) -> list[str]:
        fetched_s, names = self._known.get(kind, (float("-inf"), []))
        if time.monotonic() - fetched_s > _FRESH_S:
            names = self._fetch(kind)
            self._known[kind] = (time.monotonic(), names)
        return names

    def _fetch(self, kind: str) -> list[str]:
        ask = self._session.client.ask
        try:
            if kind == "instance":
                answer = ask(GetStatus(), _LOOK_S)
                assert isinstance(answer, StatusIs)
                return [instance.name for instance in answer.status.instances]
            if kind == "request":
                listed = ask(GetRequests(), _LOOK_S)
                assert isinstance(listed, RequestsAre)
                return [str(line.number) for line in listed.requests]
        except ExitError:  # then there is nothing to complete with
            return []
        return []


class _Words(Completer):
    """Completes words of a line."""

    def __init__(self, parser: Parser, live: LiveNames) -> None:
        self._parser = parser
        self._live = live

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        words = document.text_before_cursor.split(" ")
        line = [*(word for word in words[:-1] if word), words[-1]]
        found = candidates(self._parser, line, self._live)
        if len(line) == 1:
            found += [word for word in (*_QUIT, *_HELP) if word.startswith(line[0])]
        for word in found:
            yield Completion(word, start_position=-len(line[-1]))


def history_file() -> Path:
    """Where lines are kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "distserve" / "console_history"


def _history() -> History:
    """For its owner alone; where it cannot be written, lines are kept for as long as we run."""
    path = history_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
