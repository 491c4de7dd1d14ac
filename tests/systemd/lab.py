"""A machine of its own for a test: systemd as process 1 of private namespaces.

Needs root, `unshare` and systemd; nothing of the machine around it is changed, and at the end it
is all killed. It has its own network, `/run`, `/dev/shm` and users; the package is at
/opt/distserve.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
BOOT = Path(__file__).parent / "boot.sh"
SYSTEMD = Path("/lib/systemd/systemd")
TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "ip", "mount", "curl")
ENVIRONMENT = {
    "PATH": "/opt/distserve/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LD_LIBRARY_PATH": "/opt/python/lib",
    "LC_ALL": "C.UTF-8",
}
NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--net")
START_S = 120.0


class NoLab(Exception):
    """It cannot be had on this machine; why."""


def check() -> None:
    """Raises NoLab."""
    if os.geteuid() != 0:
        raise NoLab("only root can boot a systemd of its own")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not SYSTEMD.exists():
        raise NoLab(f"not installed: {', '.join(missing) or SYSTEMD}")
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        raise NoLab(f"no namespaces here: {tried.stderr.strip()}")


class Lab:
    """A booted lab. Commands run inside it."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._pid = pid
        self.directory = directory

    def run(self, *command: str, check: bool = True) -> str:
        """What a command prints; it sees the lab as its machine."""
        with self.running(*command) as process:
            output, _ = process.communicate()
        assert not check or process.returncode == 0, f"{command}: {process.returncode}\n{output}"
        return output

    @contextmanager
    def running(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on meanwhile, and is killed if it still does at the end."""
        enter = ["nsenter", "--target", str(self._pid), *("--mount", "--pid", "--ipc", "--uts")]
        with subprocess.Popen(
            [*enter, "--net", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        ) as process:
            try:
                yield process
            finally:
                _end(process)

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *words, check=check)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit).strip()

    def until(self, unit: str, name: str, holds: Callable[[str], bool]) -> str:
        """Wait until a property is as it should be; systemd does not tell us by itself."""
        deadline_s = time.monotonic() + START_S
        while not holds(value := self.show(unit, name)):
            state = self.systemctl("status", unit, check=False)
            assert time.monotonic() < deadline_s, f"{name}={value}\n{state}\n{self.log(unit)}"
            time.sleep(0.1)
        return value

    def until_is(self, unit: str, name: str, value: str) -> None:
        self.until(unit, name, lambda found: found == value)

    def log(self, unit: str) -> str:
        """All that a unit's processes have written."""
        file = self.directory / "log" / unit
        return file.read_text(errors="replace") if file.exists() else ""

    def until_told(self, unit: str, text: str, times: int = 1) -> None:
        """Wait for the log to hold a text: a request's line comes after its answer."""
        deadline_s = time.monotonic() + START_S
        while self.log(unit).count(text) < times:
            assert time.monotonic() < deadline_s, f"{text!r} is not told:\n{self.log(unit)}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """All that systemd has started and that has not ended."""
        return psutil.Process(self._pid).children(recursive=True)

    def write(self, path: str, text: str) -> None:
        """Write a file as an administrator would."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'printf %s "$1" >"$2"', "sh", text, path)

    @contextmanager
    def dropped_in(self, unit: str, *lines: str) -> Iterator[None]:
        """A service with other settings; stopped and as it was after."""
        directory = f"/etc/systemd/system/{unit}.d"
        self.write(f"{directory}/test.conf", "\n".join(["[Service]", *lines]))
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            self.systemctl("stop", unit, check=False)
            self.systemctl("reset-failed", unit, check=False)
            self.run("rm", "-r", directory)
            self.systemctl("daemon-reload")


@contextmanager
def booted(directory: Path, *, is_installed: bool = True) -> Iterator[Lab]:
    """A lab; with the package in place of what `make install` would put there, or without."""
    (directory / "upper").mkdir()
    with _cgroups(f"lab-{os.getpid()}") as cgroups, open(directory / "boot.log", "w") as log:
        kind = "installed" if is_installed else "bare"
        places = [str(directory), str(ROOT), sys.base_prefix, sys.prefix, kind]
        # However the tests end, the lab does with them.
        unshare = ["setpriv", "--pdeathsig", "SIGKILL", "unshare", *NAMESPACES]
        unshare += ["--fork", "--kill-child", "--mount-proc"]
        enter = 'for g in $CGROUPS; do echo $$ >"$g/cgroup.procs"; done; exec "$@"'
        process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *unshare, "bash", str(BOOT), *places],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"CGROUPS": " ".join(map(str, cgroups))},
        )
        try:
            yield _running(process, directory)
        finally:
            _end(process)


def _running(process: subprocess.Popen[bytes], directory: Path) -> Lab:
    """Wait until systemd has started what it starts by itself."""
    deadline_s = time.monotonic() + START_S
    while True:
        log = (directory / "boot.log").read_text()
        assert process.poll() is None, f"the lab did not boot:\n{log}"
        assert time.monotonic() < deadline_s, f"the lab does not boot:\n{log}"
        for child in psutil.Process(process.pid).children():
            lab = Lab(child.pid, directory)
            state = lab.systemctl("is-system-running", check=False).strip()
            if state in ("running", "degraded"):
                return lab
        time.sleep(0.1)


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill what `unshare` or `nsenter` runs; process 1 takes all others of its namespace along."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            child.kill()
    process.wait()


@contextmanager
def _cgroups(name: str) -> Iterator[list[Path]]:
    """A cgroup below our own in each hierarchy: systemd takes the one it is in for the root."""
    made = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, own = line.split(":", 2)
        for mounted in _hierarchy(number, controllers):
            cgroup = mounted / own.lstrip("/") / name
            _sweep(cgroup.parent)
            with contextlib.suppress(OSError):
                cgroup.mkdir()
                made.append(cgroup)
                _fill_cpuset(cgroup)
            break
    try:
        yield made
    finally:
        for cgroup in made:
            _remove(cgroup)


def _sweep(parent: Path) -> None:
    """Remove what tests left that were killed."""
    for cgroup in parent.glob("lab-*"):
        if not psutil.pid_exists(int(cgroup.name.removeprefix("lab-"))):
            _remove(cgroup)


def _hierarchy(number: str, controllers: str) -> list[Path]:
    base = Path("/sys/fs/cgroup")
    if number == "0":
        places = [base / "unified", base]
    else:
        places = [base / controllers.removeprefix("name=")]
    return [place for place in places if (place / "cgroup.procs").exists()]


def _fill_cpuset(cgroup: Path) -> None:
    """The first version's cpusets begin empty and would take no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (cgroup / name).exists() and (cgroup.parent / name).exists():
            (cgroup / name).write_text((cgroup.parent / name).read_text())


def _remove(cgroup: Path) -> None:
    """Deepest first; processes that were killed may take a moment to be gone from it."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        deadline_s = time.monotonic() + 10
        while True:
            try:
                os.rmdir(folder)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
