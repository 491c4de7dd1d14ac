"""The console's grammar: one tree of commands for the command line, scripts and the prompt.

It says what may be asked and with which options; what a command does, others know. A command is
named by its `leaf`, such as `status` or `requests show`.
"""

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from daemon.admin_commands import DEFAULT_DEADLINE_S, MAX_DEADLINE_S, MAX_LISTED
from daemon.console_errors import UsageError
from daemon.request import Phase
from ipc.run_dir import default_run_dir
from ipc.vocabulary import Role

NODE = "node"  # what is meant where no instance is named
_STATES = [phase.name.lower() for phase in Phase]
_EPILOG = """\
Without a command, a prompt. Exit codes: 0 done, 1 failed, 3 no daemon, 4 not permitted, 5 too
late, 6 refused by the node's state, 64 usage, 78 keys that cannot be used, 130 interrupted."""

SubParsers = Any  # argparse's own type is not public


class Parser(argparse.ArgumentParser):
    """argparse that raises its errors, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        close = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        raise argparse.ArgumentError(None, f"there is no {str(value)!r}; {hint}")


def build() -> Parser:
    """The whole tree."""
    parser = Parser(
        prog="distserve console",
        description="Look at a running daemon, and operate it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _connection(parser, is_top=True)
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="commands from a file, - for standard input; they "
        "run until the first that fails, and ask nothing"
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND")
    _looking(verbs)
    _operating(verbs)
    _the_rest(verbs)
    return parser


def _looking(verbs: SubParsers) -> None:
    _leaf(verbs, "status", "the node and its instances", _watched())
    instances = _leaf(verbs, "instances", "each instance, or all of one", _watched())
    instances.add_argument("instance", nargs="?", metavar="ID")
    _leaf(verbs, "workers", "the processes and their devices", _watched())
    requests = _group(verbs, "requests", "requests: list, show, abort", "list", [_listed()])
    _leaf(requests, "list", "those under way, or of one state", [*_watched(), _listed()])
    shown = _leaf(requests, "show", "one request, by number or X-Request-Id", _watched())
    shown.add_argument("request", metavar="ID")
    abort = _leaf(requests, "abort", "end one request; its client is told", _careful())
    abort.add_argument("request", metavar="ID")
    kv = _group(verbs, "kv", "KV blocks: pools, audit", "pools")
    _leaf(kv, "pools", "blocks by instance", _watched())
    _leaf(kv, "audit", "every leader looks over its block books now", _watched())
    _leaf(verbs, "slo", "how the targets were met, of late", _watched())
    trace = _leaf(verbs, "trace", "where requests spent their time", [])
    which = trace.add_mutually_exclusive_group()
    which.add_argument("request", nargs="?", metavar="ID")
    which.add_argument("--last", type=_count, metavar="N", help="the last N that ended [1]")
    trace.add_argument("--chrome", metavar="FILE", help="write it for chrome://tracing, - for here")
    top = _leaf(verbs, "top", "a live view, until Ctrl-C", [])
    top.add_argument("--every", type=seconds, default=1.0, metavar="S", help="[%(default)g]")
    events = _leaf(verbs, "events", "what happened of late", [])
    events.add_argument("--follow", action="store_true", help="and what happens, until Ctrl-C")
    _leaf(verbs, "config", "the configuration in effect", [])


def _operating(verbs: SubParsers) -> None:
    plan = _group(verbs, "plan", "the placement: show, check, apply", "show")
    _leaf(plan, "show", "which instances run where", _watched())
    check = _leaf(plan, "check", "what taking over a placement file would do", [])
    check.add_argument("plan_file", type=Path, metavar="FILE")
    apply = _leaf(plan, "apply", "take over a placement file", _careful(), has_deadline=True)
    apply.add_argument("plan_file", type=Path, metavar="FILE")
    drain = _leaf(
        verbs,
        "drain",
        "take nothing new, wait until nothing is left",
        _careful(),
        has_deadline=True,
    )
    drain.add_argument("instance", nargs="?", default=NODE, metavar="node|ID")
    undrain = _leaf(verbs, "undrain", "take requests again", _careful())
    undrain.add_argument("instance", nargs="?", default=NODE, metavar="node|ID")
    restart = _leaf(verbs, "restart", "replace an instance", _careful(), has_deadline=True)
    restart.add_argument("instance", metavar="ID")
    scale = _group(verbs, "scale", "instances: add, remove", None)
    add = _leaf(scale, "add", "start one more on free devices", _careful())
    add.add_argument("role", choices=[role.value for role in Role], metavar="ROLE")
    add.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel degree [1]")
    add.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages [1]")
    remove = _leaf(scale, "remove", "drain one and let it go", _careful(), has_deadline=True)
    remove.add_argument("instance", metavar="ID")
    level = _leaf(verbs, "log-level", "log more, or less", _careful())
    level.add_argument("level", choices=["debug", "info", "warning", "error"], metavar="LEVEL")
    level.add_argument("logger", nargs="?", default="", metavar="LOGGER")
    level.add_argument("--for", dest="for_s", type=seconds, metavar="S", help="then as it was")
    shutdown = _leaf(verbs, "shutdown", "drain the daemon and end it", _careful())
    shutdown.add_argument("--now", action="store_true", help="what is under way ends by an error")
    shutdown.add_argument("--deadline", type=seconds, metavar="S", help="[as configured]")


def _the_rest(verbs: SubParsers) -> None:
    _leaf(verbs, "version", "the daemon's versions", [])
    _leaf(verbs, "ping", "how long an answer takes", _watched())
    keygen = _leaf(verbs, "keygen", "make keys for a console over TCP", [])
    keygen.add_argument("directory", type=Path, metavar="DIR")
    keygen.add_argument("--name", default="console", help="whose keys [%(default)s]")


def _group(
    verbs: SubParsers,
    name: str,
    text: str,
    default: str | None,
    parents: Iterable[argparse.ArgumentParser] = (),
) -> SubParsers:
    """A verb of several actions; where one may be left out, its options may stand without it."""
    told = f"{text} [{default}]" if default else text
    own = [*parents, *(_watched() if default else [])]
    parser = verbs.add_parser(name, help=told, description=told, parents=own, allow_abbrev=False)
    _connection(parser, is_top=False)
    parser.set_defaults(leaf=f"{name} {default}")
    return parser.add_subparsers(dest="action", metavar="ACTION", required=default is None)


def _leaf(
    verbs: SubParsers,
    name: str,
    text: str,
    parents: Iterable[argparse.ArgumentParser],
    *,
    has_deadline: bool = False,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text, parents=list(parents), allow_abbrev=False
    )
    _connection(parser, is_top=False)
    words = parser.prog.removeprefix("distserve console ")
    parser.set_defaults(leaf=words)
    if has_deadline:
        parser.add_argument(
            "--deadline", type=seconds, default=DEFAULT_DEADLINE_S, metavar="S",
            help="how long what is there may take [%(default)g]",
        )  # fmt: skip
    return parser


def _connection(parser: argparse.ArgumentParser, *, is_top: bool) -> None:
    """Options that may stand anywhere; where they do not stand, they leave alone what did."""

    def default(value: Any) -> Any:
        return value if is_top else argparse.SUPPRESS

    parser.add_argument(
        "--run-dir", type=Path, default=default(default_run_dir()), metavar="DIR",
        help=f"the daemon's run directory [{default_run_dir()}]",
    )  # fmt: skip
    parser.add_argument(
        "--connect", default=default(None), metavar="tcp://HOST:PORT", help="over TCP, with keys"
    )
    parser.add_argument(
        "--keys", type=Path, default=default(None), metavar="FILE", help="of `console keygen`"
    )
    parser.add_argument(
        "--json", action="store_true", default=default(False), help="one JSON object a line"
    )


def _watched() -> list[argparse.ArgumentParser]:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(
        "--watch", type=seconds, nargs="?", const=2.0, metavar="S",
        help="again every S seconds [2] until Ctrl-C",
    )  # fmt: skip
    return [parent]


def _listed() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--state", choices=_STATES, help="ended ones too, while they are kept")
    parent.add_argument("--slow", type=_count, metavar="N", help="the N that took longest")
    return parent


def _careful() -> list[argparse.ArgumentParser]:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parent.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return [parent]


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_DEADLINE_S:
        raise argparse.ArgumentTypeError("a number of seconds from above 0 to a day")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_LISTED:
        raise argparse.ArgumentTypeError(f"a number from 1 to {MAX_LISTED}")
    return value


def parse_line(parser: Parser, words: list[str], outer: argparse.Namespace) -> argparse.Namespace:
    """A command within a session: connected already, and what the session said goes on.

    Raises:
        UsageError: it says nothing that can be done here.
    """
    arguments = parser.parse_args(words)
    for name in ("run_dir", "connect", "keys"):
        if getattr(arguments, name) not in (parser.get_default(name), getattr(outer, name)):
            raise UsageError(f"--{name.replace('_', '-')} is for the start of the console")
    if arguments.verb is None or arguments.file is not None or arguments.verb == "keygen":
        raise UsageError("only a command that asks the daemon can stand here")
    arguments.json = arguments.json or outer.json
    return arguments
