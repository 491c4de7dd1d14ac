"""What is done to real processes: by signals, by limits, by orders that they carry out within."""

import contextlib
import os
import re
import resource
import signal
import time
from enum import StrEnum, auto
from pathlib import Path

from tests.end_to_end.service import Service, eventually

PAUSE_S = 1.0
SLOW_S, SLOW_CYCLE_S, SLOWNESS = 3.0, 0.1, 10
PEER_BACK_S = 150.0
DAEMON = "daemon"
KILLED_BY = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM}


class Attack(StrEnum):
    """Those in the second half are orders (see `injected.sitecustomize`)."""

    SIGKILL = auto()
    SIGTERM = auto()
    PAUSED = auto()  # SIGSTOP, for less than the watchdog's bound
    FROZEN = auto()  # SIGSTOP, for good
    SLOW = auto()  # a tenth of the time
    NO_MEMORY = auto()  # killed, and its successor's pool is refused
    NO_DESCRIPTORS = auto()  # while a peer is killed and comes back
    HUNG_STEP = auto()
    DROPPED_UP = auto()
    DROPPED_DOWN = auto()
    DUPLICATED_UP = auto()
    CORRUPT_UP = auto()
    CORRUPT_DOWN = auto()

    @property
    def is_order(self) -> bool:
        return self in list(Attack)[list(Attack).index(Attack.HUNG_STEP) :]

    @property
    def is_deadly(self) -> bool:
        """Whether the victim has to be started again."""
        return self not in (Attack.PAUSED, Attack.SLOW, Attack.NO_DESCRIPTORS)


def pid_of(service: Service, instance: str) -> int:
    """The daemon, or the newest leader of an instance, as the log tells it."""
    if instance == DAEMON:
        return service.process.pid
    started = re.compile(rf"{re.escape(instance)}/0\.0 started, process (\d+)")
    return int(next(m[1] for line in reversed(service.lines) if (m := started.search(line))))


def strike(attack: Attack, service: Service, victim: str, orders: Path) -> None:
    """Do it to an instance; returns when nothing more is to be done."""
    if attack.is_order:
        (orders / f"{attack}@{victim}").touch()
        return
    pid = pid_of(service, victim)
    with contextlib.suppress(ProcessLookupError):
        match attack:
            case Attack.SIGKILL | Attack.SIGTERM:
                os.kill(pid, KILLED_BY[attack])
            case Attack.PAUSED:
                pause(pid, PAUSE_S)
            case Attack.FROZEN:
                os.kill(pid, signal.SIGSTOP)
            case Attack.SLOW:
                slow_down(pid)
            case Attack.NO_MEMORY:
                (orders / f"{attack}@{victim}").touch()
                os.kill(pid, signal.SIGKILL)
            case Attack.NO_DESCRIPTORS:
                with no_descriptors(pid):
                    replace(service, peer_of(service, victim), waits=victim != DAEMON)


def replace(service: Service, instance: str, *, waits: bool) -> None:
    """Kill it; `waits` until its successor has been introduced."""
    ready = f"{instance} is ready"
    num_lives = service.log.count(ready)
    os.kill(pid_of(service, instance), signal.SIGKILL)
    if waits:
        eventually(lambda: service.log.count(ready) > num_lives, PEER_BACK_S, f"{ready} again")
    time.sleep(1.0)


def pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def slow_down(pid: int) -> None:
    until_s = time.monotonic() + SLOW_S
    while time.monotonic() < until_s:
        pause(pid, SLOW_CYCLE_S * (1 - 1 / SLOWNESS))
        time.sleep(SLOW_CYCLE_S / SLOWNESS)


@contextlib.contextmanager
def no_descriptors(pid: int) -> "contextlib.AbstractContextManager[None]":
    """The process has as many open as it may."""
    _, hard = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def peer_of(service: Service, instance: str) -> str:
    """Another instance: its pool, when it comes back, is what needs a descriptor."""
    started = re.findall(r"(\S+)/0\.0 started, process", service.log)
    others = sorted({name for name in started if name != instance})
    pulled_from = [name for name in others if name.startswith("prefill")]
    return (pulled_from or others)[0]
