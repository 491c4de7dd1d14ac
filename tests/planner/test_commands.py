"""The planner as a program: Ctrl-C while it loads, and an output that nobody takes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from planner.__main__ import main

PROGRAM = [sys.executable, "-P", "-m", "planner"]
A_RUN = [
    *("simulate", "--model", "opt-13b", "--coefficients", "distserve"),
    *("--rate", "1", "--num-requests", "100"),
]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_who_has_seen_enough_ends_it_without_a_word(form: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [*PROGRAM, *A_RUN, *form], stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_is_one_sentence(form: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PROGRAM, *A_RUN, *form], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert ended.returncode == 2
    assert ended.stderr.decode().splitlines() == [
        "distserve simulate: [Errno 28] No space left on device"
    ]


def test_ctrl_c_while_it_loads_ends_it_without_a_traceback() -> None:
    started = subprocess.Popen([*PROGRAM, *A_RUN], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    time.sleep(0.2)  # the interpreter is up, numpy is not
    started.send_signal(signal.SIGINT)
    _, told = started.communicate(timeout=60)
    assert b"Traceback" not in told
    assert started.returncode in (-signal.SIGINT, 130)


def test_a_word_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", "a\udcff.csv"]) == 2
    assert capsys.readouterr().err == "distserve simulate: 'a\\udcff.csv' is not UTF-8\n"
