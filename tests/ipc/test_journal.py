"""Log lines as the journal and as people get them."""

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from ipc import journal
from ipc.journal import JournalFormatter, TextFormatter, is_journal


def record(message: str, *arguments: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("daemon.serve", level, "serve.py", 1, message, arguments, None)


def failed_record(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except type(error):
        made = record("worker %s died", "p0", level=logging.ERROR)
        made.exc_info = sys.exc_info()
        return made


def test_the_journal_gets_a_priority_and_no_time() -> None:
    formatter = JournalFormatter()
    assert formatter.format(record("ready in %.1f s", 2.0)) == "<6>daemon.serve: ready in 2.0 s"
    levels = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.DEBUG)
    starts = [formatter.format(record("x", level=level))[:3] for level in levels]
    assert starts == ["<3>", "<3>", "<4>", "<7>"]


def test_people_get_time_level_and_logger() -> None:
    line = TextFormatter().format(record("ready", level=logging.WARNING))
    assert line.endswith("WARNING daemon.serve: ready")
    assert line[2] == line[5] == ":"


def test_a_clients_text_can_neither_forge_a_line_nor_drive_a_terminal() -> None:
    for formatter in (TextFormatter(), JournalFormatter()):
        line = formatter.format(record("model %s", "x\n<3>daemon: forged\x1b[2J\u2028"))
        assert "\n" not in line
        assert r"x\n<3>daemon: forged\x1b[2J\u2028" in line


def test_every_line_of_a_traceback_keeps_its_records_priority() -> None:
    lines = JournalFormatter().format(failed_record(ValueError("first\nsecond"))).split("\n")
    assert lines[0] == "<3>daemon.serve: worker p0 died"
    assert len(lines) > 3
    assert all(line.startswith("<3>    ") for line in lines[1:])


def test_priorities_are_only_for_the_stream_that_the_journal_gave(tmp_path: Path) -> None:
    with open(tmp_path / "stream", "w") as stream:
        status = os.fstat(stream.fileno())
        given = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert is_journal(stream, given)
        assert not is_journal(stream, {"JOURNAL_STREAM": "1:1"})
        assert not is_journal(stream, {})
    assert not is_journal(io.StringIO(), given)


def test_set_up_replaces_the_root_handler_and_respects_the_level() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    try:
        journal.set_up(logging.WARNING, out)
        logging.getLogger("daemon.serve").info("not shown")
        logging.getLogger("daemon.serve").warning("shown once")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert out.getvalue().count("\n") == 1
    assert "shown once" in out.getvalue()


def test_json_is_one_object_a_line_with_the_facts_of_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(journal.LOG_FORMAT, journal.JSON)
    stream = io.StringIO()
    made = failed_record(ValueError("first\nsecond \udc80"))
    made.fields = {"status": 200, "key": None}
    before = logging.getLogger().handlers[:]
    journal.set_up(stream=stream)
    try:
        logging.getLogger().handle(made)
        logging.getLogger("x").warning("client said %s", "a\nb\x1b \udc80")
    finally:
        logging.getLogger().handlers[:] = before
    failed, plain = (json.loads(line) for line in stream.getvalue().splitlines())
    assert failed["level"] == "error"
    assert failed["status"] == 200
    assert "ValueError: first\nsecond" in failed["traceback"]
    assert (plain["logger"], plain["level"]) == ("x", "warning")
    assert plain["message"] == r"client said a\nb\x1b \udc80"


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
def test_a_child_logs_what_its_parent_logs_at_that_moment(level: int) -> None:
    """Workers once wrote lines of INFO, whatever was configured."""
    root = logging.getLogger()
    before = root.level
    try:
        root.setLevel(level)
        assert journal.inherited_level(journal.for_children()) == level
    finally:
        root.setLevel(before)


@pytest.mark.parametrize("environment", [{}, {journal.LOG_LEVEL: "loud"}])
def test_where_no_parent_says_anything_of_use_the_level_is_info(
    environment: dict[str, str],
) -> None:
    assert journal.inherited_level(environment) == logging.INFO
