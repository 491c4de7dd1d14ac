"""From a parsed command line to what the daemon is asked. Pure, but for files that are read."""

import argparse
from pathlib import Path

from daemon.admin_commands import (
    MAX_PLACEMENT_BYTES,
    Abort,
    ApplyPlan,
    AuditBooks,
    Command,
    Drain,
    GetConfig,
    GetEvents,
    GetPlan,
    GetRequests,
    GetSlo,
    GetStatus,
    GetTimelines,
    GetVersion,
    Order,
    Question,
    Restart,
    ScaleAdd,
    ScaleRemove,
    SetLogLevel,
    Shutdown,
    Undrain,
    Waiting,
)
from daemon.console_errors import UsageError
from daemon.console_parser import NODE
from ipc.vocabulary import Role


def command_of(arguments: argparse.Namespace) -> Command:
    """What is to be asked first. Raises UsageError: a file that it names cannot be read."""
    asked = _question(arguments)
    return asked if asked is not None else _order(arguments)


def _question(arguments: argparse.Namespace) -> Question | Waiting | None:
    match arguments.leaf:
        case "status" | "instances" | "workers" | "kv pools":
            return GetStatus()
        case "requests list":
            return GetRequests(arguments.state, arguments.slow)
        case "requests show":
            return GetTimelines(arguments.request)
        case "trace":
            return GetTimelines(arguments.request, arguments.last or 1)
        case "kv audit":
            return AuditBooks()
        case "slo":
            return GetSlo()
        case "plan show":
            return GetPlan()
        case "events":
            return GetEvents()
        case "config":
            return GetConfig()
        case "version" | "ping":
            return GetVersion()
        case _:
            return None


def _order(arguments: argparse.Namespace) -> Order:
    match arguments.leaf:
        case "requests abort":
            return Abort(arguments.request, arguments.dry_run)
        case "plan check":
            return ApplyPlan(_text(arguments.plan_file), dry_run=True)
        case "plan apply":
            return ApplyPlan(_text(arguments.plan_file), arguments.deadline, arguments.dry_run)
        case "drain":
            return Drain(arguments.deadline, _instance(arguments), arguments.dry_run)
        case "undrain":
            return Undrain(_instance(arguments), arguments.dry_run)
        case "restart":
            return Restart(arguments.instance, arguments.deadline, arguments.dry_run)
        case "scale add":
            role = Role(arguments.role)
            return ScaleAdd(role, arguments.tp, arguments.pp, arguments.dry_run)
        case "scale remove":
            return ScaleRemove(arguments.instance, arguments.deadline, arguments.dry_run)
        case "log-level":
            return SetLogLevel(
                arguments.level, arguments.logger, arguments.for_s, arguments.dry_run
            )
        case "shutdown":
            deadline_s = 0.0 if arguments.now else arguments.deadline
            return Shutdown(deadline_s, arguments.dry_run)
        case unknown:
            raise AssertionError(f"{unknown} is in the grammar and does nothing")


def _instance(arguments: argparse.Namespace) -> str | None:
    return None if arguments.instance == NODE else str(arguments.instance)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_PLACEMENT_BYTES:
            raise UsageError(f"{path} is too large for a placement file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} cannot be read: {reason}") from error
