"""Logging set-up of every process: priorities for the journal, plain text for people.

Where stderr is the journal's own stream, lines begin with `<N>`, syslog's priority, and leave
time and process to the journal. Elsewhere they carry both. Where JSON is asked for, a record is
one object. In any case it is one line, or continues on lines of its own prefix: control
characters in a message are escaped, so that nothing a client sends can forge a log line or drive
a terminal.
"""

import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

import orjson

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
LOG_FORMAT = "DISTSERVE_LOG_FORMAT"
"""The environment's word for the form of lines, which workers inherit from their daemon."""
LOG_LEVEL = "DISTSERVE_LOG_LEVEL"
"""And for the least level of which there are lines: their daemon's when they were started."""
JSON = "json"

_FIELDS = "fields"
_TEXT_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


def set_up(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send every record of `level` and above to stderr, in the form that stderr calls for."""
    out = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(out)
    handler.setFormatter(_formatter_for(out))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)


def for_children() -> dict[str, str]:
    """What the environment of a child says, so that it logs what we log now."""
    return {LOG_LEVEL: logging.getLevelName(logging.getLogger().level)}


def inherited_level(environment: Mapping[str, str] = os.environ) -> int:
    """What a parent has said; INFO where it said nothing."""
    return logging.getLevelNamesMapping().get(environment.get(LOG_LEVEL, ""), logging.INFO)


def follow(level: int | None) -> None:
    """Log from that level on, as a parent does by now; None: as before."""
    if level is not None and level != logging.getLogger().level:
        logging.getLogger().setLevel(level)


def is_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JOURNAL_STREAM names this very stream: children may have theirs redirected."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def with_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """For `extra` of a record: facts that stand beside the message where lines are JSON."""
    return {_FIELDS: fields}


def _formatter_for(stream: TextIO) -> logging.Formatter:
    if os.environ.get(LOG_FORMAT) == JSON:
        return JsonFormatter()
    return JournalFormatter() if is_journal(stream) else TextFormatter()


class _Escaping(logging.Formatter):
    """A message stays on one line; what follows it (a traceback) is indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        first, *rest = super().format(record).split("\n")
        lines = [first, *(f"    {escaped(line)}" for line in rest)]
        return "\n".join(f"{self.prefix(record)}{line}" for line in lines)

    def prefix(self, record: logging.LogRecord) -> str:
        """What each line of a record begins with."""
        return ""


class TextFormatter(_Escaping):
    """Time, level, logger and message."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT, datefmt="%H:%M:%S")


class JournalFormatter(_Escaping):
    """`<N>` before each line, so that a traceback keeps the priority of its record."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def prefix(self, record: logging.LogRecord) -> str:
        return f"<{priority(record.levelno)}>"


class JsonFormatter(logging.Formatter):
    """One object a line; a traceback is one text in it."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": escaped(record.getMessage()),
        }
        if record.exc_info:
            text = self.formatException(record.exc_info)
            entry["traceback"] = text.encode(errors="backslashreplace").decode()
        entry |= getattr(record, _FIELDS, {})
        return orjson.dumps(entry, default=str).decode()


def priority(level: int) -> int:
    """Syslog's number for a level of logging."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def escaped(text: str) -> str:
    """The text with everything that is not printable spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
