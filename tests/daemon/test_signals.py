"""Signals before the loop runs and while it does, sent to a process of their own."""

import os
import pty
import signal
import subprocess
import sys

import pytest

EARLY = """
import signal, sys
from daemon import signals
try:
    signals.before_the_loop()
    print("up", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    print("left")
"""

LATE = """
import asyncio
from daemon import signals

signals.before_the_loop()

async def main():
    called = asyncio.Queue()
    stop, reload = (lambda word=word: called.put_nowait(word) for word in ("stop", "reload"))
    with signals.handled(stop, reload):
        print("up", flush=True)
        while (word := await called.get()) != "stop":
            print(word, flush=True)
    print("stopped")

asyncio.run(main())
"""


def started(script: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=stdin, stdout=subprocess.PIPE, text=True
    )
    assert line(process) == "up"
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_loop_a_stop_leaves_with_all_undone_C8(number: signal.Signals) -> None:
    with started(EARLY) as process:
        process.send_signal(number)
        assert line(process) == "left"
    assert process.returncode == 0


def test_before_the_loop_a_reload_is_passed_over() -> None:
    with started(EARLY) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert line(process) == "left"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_daemon_is_reloaded_and_stopped(number: signal.Signals) -> None:
    with started(LATE) as process:
        process.send_signal(signal.SIGHUP)
        assert line(process) == "reload"
        process.send_signal(number)
        assert line(process) == "stopped"
    assert process.returncode == 0


def test_a_terminal_that_goes_away_stops_the_daemon() -> None:
    ours, theirs = pty.openpty()
    try:
        with started(LATE, stdin=theirs) as process:
            process.send_signal(signal.SIGHUP)
            assert line(process) == "stopped"
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("script", [EARLY, LATE])
def test_what_log_rotation_sends_ends_nothing(script: str) -> None:
    with started(script) as process:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGTERM)
        assert line(process) in ("left", "stopped")
    assert process.returncode == 0
