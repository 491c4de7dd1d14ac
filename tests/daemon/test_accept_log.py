"""A listener without descriptors to spare does not flood the log."""

import asyncio
import errno
import logging
import socket
from contextlib import closing
from typing import Any

import pytest

from daemon.accept_log import APART_S, AcceptLog
from daemon.http_server import ACCEPTED_AT_ONCE

LINE = "no connection can be taken, those that come have to wait: [Errno 24] Too many open files"


class Exhausted(socket.socket):
    """A listener of a process that may open no more files."""

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")


async def test_as_many_tries_as_asyncio_makes_in_one_go_are_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They once were a line each, with a traceback, every second."""
    loop, tries, tried = asyncio.get_running_loop(), [0], asyncio.Event()
    log = AcceptLog()

    def handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        log(loop, context)
        tries[0] += 1
        tried.set()

    loop.set_exception_handler(handler)
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    server = await loop.create_server(asyncio.Protocol, sock=listener, backlog=ACCEPTED_AT_ONCE)
    with closing(socket.create_connection(listener.getsockname())):
        await tried.wait()
    server.close()
    assert tries[0] >= 1
    assert [record.getMessage() for record in caplog.records] == [LINE]
    assert caplog.records[0].exc_info is None


def exhausted() -> dict[str, Any]:
    error = OSError(errno.EMFILE, "Too many open files")
    return {"message": "socket.accept() out of system resource", "exception": error, "socket": 1}


def test_it_is_said_again_after_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    log, loop = AcceptLog(lambda: now_s[0]), asyncio.new_event_loop()
    with closing(loop):
        for _ in range(3):
            for _ in range(64):
                log(loop, exhausted())
            now_s[0] += APART_S
    assert caplog.messages == [LINE] * 3


def test_all_else_is_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    log, loop = AcceptLog(), asyncio.new_event_loop()
    with closing(loop), caplog.at_level(logging.ERROR):
        log(loop, {"message": "a task was lost", "exception": ValueError("why")})
        log(loop, {"message": "read failed", "exception": OSError(24, "x"), "transport": 1})
    assert [message.splitlines()[0] for message in caplog.messages] == [
        "a task was lost",
        "read failed",
    ]
