"""The notify protocol against a real datagram socket in the service manager's place."""

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.sd_notify import Notifier
from tests.daemon.fake_manager import FakeManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    fake = FakeManager(str(tmp_path / "notify"))
    with fake.socket:
        yield fake


@pytest.fixture
def notifier(manager: FakeManager) -> Iterator[Notifier]:
    with Notifier(manager.address) as connected:
        yield connected


def test_ready_and_stopping_carry_their_status_in_the_same_datagram(
    manager: FakeManager, notifier: Notifier
) -> None:
    notifier.ready("serving smollm2")
    notifier.stopping("draining 3 requests")
    assert manager.received() == [
        ["READY=1", "STATUS=serving smollm2"],
        ["STOPPING=1", "STATUS=draining 3 requests"],
    ]


def test_watchdog_and_extend_speak_the_managers_units(
    manager: FakeManager, notifier: Notifier
) -> None:
    notifier.watchdog()
    notifier.extend(2.5, "loading 61%")
    assert manager.received() == [
        ["WATCHDOG=1"],
        ["EXTEND_TIMEOUT_USEC=2500000", "STATUS=loading 61%"],
    ]


def test_a_reload_says_when_it_began_in_the_same_datagram(
    manager: FakeManager, notifier: Notifier
) -> None:
    before_us = time.monotonic_ns() // 1000
    notifier.reloading()
    [[reloading, began]] = manager.received()
    assert reloading == "RELOADING=1"
    key, _, began_us = began.partition("=")
    assert key == "MONOTONIC_USEC"
    assert before_us <= int(began_us) <= time.monotonic_ns() // 1000


def test_a_status_cannot_smuggle_in_another_assignment(
    manager: FakeManager, notifier: Notifier
) -> None:
    notifier.status("model \nREADY=1\x1b[2J\u2028MAINPID=1")
    assert manager.received() == [["STATUS=model  READY=1 [2J MAINPID=1"]]


def test_an_endless_status_is_cut(manager: FakeManager, notifier: Notifier) -> None:
    notifier.status("x" * 100_000)
    assert manager.received() == [["STATUS=" + "x" * 200]]


def test_an_abstract_address_is_understood() -> None:
    manager = FakeManager(f"@distserved-test-{secrets.token_hex(8)}")
    with manager.socket, Notifier(manager.address) as notifier:
        notifier.ready()
        assert manager.received() == [["READY=1"]]


def test_a_full_queue_drops_a_status_without_waiting(
    manager: FakeManager, notifier: Notifier
) -> None:
    num_fillers = manager.fill()
    notifier.status("lost")
    notifier.ready()
    assert manager.received() == [["STATUS=filler"]] * num_fillers
    notifier.ready()
    assert manager.received() == [["READY=1"]]


def test_a_manager_that_went_away_is_survived(manager: FakeManager, notifier: Notifier) -> None:
    manager.socket.close()
    notifier.status("nobody listens")
    notifier.stopping()
    assert not notifier.is_active


@pytest.mark.parametrize("address", ["/nowhere/at/all", "vsock:2:1234", "relative"])
def test_an_address_that_leads_nowhere_makes_a_no_op(address: str) -> None:
    notifier = Notifier(address, watchdog_s=30.0)
    notifier.ready()
    assert not notifier.is_active
    assert notifier.ping_interval_s is None


def test_without_a_manager_everything_is_a_no_op() -> None:
    notifier = Notifier.from_environment({})
    notifier.ready("serving")
    notifier.watchdog()
    notifier.close()
    assert not notifier.is_active


def test_children_inherit_nothing_of_the_managers_variables(manager: FakeManager) -> None:
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDNAMES": "http",
        "PATH": "/bin",
    }
    with Notifier.from_environment(environment) as notifier:
        assert environment == {"PATH": "/bin"}
        assert notifier.ping_interval_s == 10.0


@pytest.mark.parametrize(
    ("limit", "pid"), [("30000000", "1"), ("0", ""), ("soon", ""), ("", ""), ("-1", "")]
)
def test_a_watchdog_meant_for_another_process_or_for_none_is_not_pinged(
    manager: FakeManager, limit: str, pid: str
) -> None:
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": limit,
        "WATCHDOG_PID": pid,
    }
    with Notifier.from_environment(environment) as notifier:
        assert notifier.ping_interval_s is None
