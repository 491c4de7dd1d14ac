"""Logging set-up of every process: priorities for the journal, plain text for people.

Where stderr is the journal's own stream, lines begin with `<N>`, syslog's priority, and leave
time and process to the journal. Elsewhere they carry both. Either way a record is one line, or
continues on lines of its own prefix: control characters in a message are escaped, so that
nothing a client sends can forge a log line or drive a terminal.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_TEXT_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


def set_up(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send every record of `level` and above to stderr, in the form that stderr calls for."""
    out = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(out)
    handler.setFormatter(JournalFormatter() if is_journal(out) else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)


def is_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JOURNAL_STREAM names this very stream: children may have theirs redirected."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


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


def priority(level: int) -> int:
    """Syslog's number for a level of logging."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def escaped(text: str) -> str:
    """The text with everything that is not printable spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
