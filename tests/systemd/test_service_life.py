"""How a service that is slow, stuck, killed, wrong or one of several lives and ends."""

import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.systemd.conftest import assert_nothing_is_left, complete, configure, curl
from tests.systemd.lab import Lab

UNIT = "distserved.service"
NEVER_AGAIN = "RestartSec=600"  # what is left is looked at meanwhile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def as_it_was(lab: Lab) -> Iterator[None]:
    configure(lab, "node")
    yield
    lab.systemctl("stop", UNIT, check=False)
    lab.systemctl("reset-failed", check=False)


def workers(lab: Lab) -> list[psutil.Process]:
    return [process for process in lab.processes() if "gpu_workers" in process.cmdline()]


def main_process(lab: Lab) -> psutil.Process:
    found = [process for process in lab.processes() if "serve" in process.cmdline()]
    assert len(found) == 1
    return found[0]


def test_a_drain_may_take_longer_than_systemd_waits_by_itself_C9_C20(lab: Lab) -> None:
    """Longer than one extension, too: it asks again and again."""
    configure(lab, "node", drain_s=20, wedged_after_s=3600)
    with lab.dropped_in(UNIT, "TimeoutStopSec=2"):
        lab.systemctl("start", UNIT)
        lab.until(UNIT, "StatusText", lambda text: text == "ready: 0 requests under way")
        for worker in workers(lab):
            worker.send_signal(signal.SIGSTOP)
        with lab.running(*curl()) as client:
            lab.until(UNIT, "StatusText", lambda text: text == "ready: 1 request under way")
            begin_s = time.monotonic()
            lab.systemctl("stop", "--no-block", UNIT)
            lab.until(UNIT, "StatusText", lambda text: text == "draining: 1 request under way")
            lab.until_is(UNIT, "ActiveState", "inactive")
            assert time.monotonic() - begin_s > 20
            assert (
                "the service was stopped before this request could finish"
                in client.communicate()[0]
            )
        assert lab.show(UNIT, "Result") == "success"
        assert_nothing_is_left(lab)


def test_a_daemon_that_stands_still_is_aborted_with_a_traceback_and_restarted(lab: Lab) -> None:
    with lab.dropped_in(UNIT, "WatchdogSec=3", NEVER_AGAIN):
        lab.systemctl("start", UNIT)
        main_process(lab).send_signal(signal.SIGSTOP)
        lab.until_is(UNIT, "SubState", "auto-restart")
        assert lab.show(UNIT, "Result") == "watchdog"
        lab.until_told(UNIT, "Fatal Python error: Aborted")
        assert_nothing_is_left(lab)


def test_a_daemon_at_work_satisfies_a_strict_watchdog(lab: Lab) -> None:
    with lab.dropped_in(UNIT, "WatchdogSec=3"):
        lab.systemctl("start", UNIT)
        begin = lab.show(UNIT, "WatchdogTimestampMonotonic")
        for _ in range(3):
            begin = lab.until(UNIT, "WatchdogTimestampMonotonic", lambda now, old=begin: now != old)  # type: ignore[misc]
        assert lab.show(UNIT, "NRestarts") == "0"
        assert lab.show(UNIT, "ActiveState") == "active"


def test_nothing_is_left_of_a_daemon_that_is_killed_C7(lab: Lab) -> None:
    with lab.dropped_in(UNIT, NEVER_AGAIN):
        lab.systemctl("start", UNIT)
        assert len(workers(lab)) == 2
        main_process(lab).kill()
        lab.until_is(UNIT, "SubState", "auto-restart")
        assert lab.show(UNIT, "Result") == "signal"
        assert_nothing_is_left(lab)


def test_a_stop_while_the_workers_load_ends_everything_C8(lab: Lab) -> None:
    lab.systemctl("start", "--no-block", UNIT)
    lab.until(UNIT, "StatusText", lambda text: text.startswith("starting"))
    lab.systemctl("stop", UNIT)
    assert lab.show(UNIT, "Result") == "success"
    assert_nothing_is_left(lab)


def test_a_configuration_that_cannot_work_is_not_tried_again(lab: Lab) -> None:
    configure(lab, "node", prefill=0)
    lab.systemctl("start", UNIT, check=False)
    assert lab.show(UNIT, "ActiveState") == "failed"
    assert lab.show(UNIT, "ExecMainStatus") == "78"
    assert lab.show(UNIT, "NRestarts") == "0"
    lab.until_told(UNIT, "nobody prefills")


def test_a_crash_loop_ends_C18(lab: Lab) -> None:
    """Every start finds the port taken, which may pass, so it is tried again; not for ever."""
    with (
        lab.dropped_in(UNIT, "RestartSec=100ms"),
        lab.running("python3", "-m", "http.server", "8000"),
    ):
        lab.systemctl("start", UNIT, check=False)
        lab.until_is(UNIT, "ActiveState", "failed")
        assert lab.show(UNIT, "NRestarts") == "5"
        assert lab.show(UNIT, "ExecMainStatus") == "75"
        lab.until_told(UNIT, "8000 is in use")


def test_two_instances_of_the_template_live_side_by_side(lab: Lab) -> None:
    for name, port in (("a", 8001), ("b", 8002)):
        configure(lab, name, port=port)
        lab.systemctl("start", f"distserved@{name}")
    assert complete(lab, 8001)
    lab.systemctl("stop", "distserved@a")
    assert lab.run("ls", "/run").split().count("distserved-a") == 0
    assert complete(lab, 8002)
    lab.systemctl("stop", "distserved@b")
    assert_nothing_is_left(lab)


def test_a_socket_unit_lets_connections_wait_for_the_service(lab: Lab) -> None:
    lab.systemctl("start", "distserved.socket")
    try:
        code = lab.run(*curl(8000, "--output", "/dev/null", "--write-out", "%{http_code}"))
        assert code in ("200", "503")  # accepted, though nobody ran when it came
        lab.until_is(UNIT, "ActiveState", "active")
        assert complete(lab)
        lab.until_told(UNIT, "127.0.0.1:8000")
    finally:
        lab.systemctl("stop", "distserved.socket", UNIT)
