"""The run directory: where a daemon's sockets live, and the lock that keeps a second one out.

Everything with a name in here carries its owner's identity: whoever holds the lock owns all of
it and may remove what a dead owner left.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

# sockaddr_un holds 107 bytes of path; libzmq refuses more.
MAX_SOCKET_PATH = 107

MODE = 0o750
_DIGITS = 10


class RunDirBusy(Exception):
    """Another live daemon holds this run directory."""


class RunDirUnusable(Exception):
    """The run directory cannot be made, is not ours, or its path is too long for a socket."""


class RunDir:
    """Names inside one daemon's run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def worker_socket(self) -> Path:
        return self.path / "workers.ipc"

    @property
    def admin_socket(self) -> Path:
        return self.path / "admin.ipc"

    def weights_socket(self, digest: str) -> Path:
        """Where weights of that digest are handed out; as short as the workers' own socket's."""
        return self.path / f"w{digest[:_DIGITS]}"


def default_run_dir() -> Path:
    """systemd's RuntimeDirectory, else the user's own, else one in /tmp that names the user."""
    if systemd := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(systemd.split(":")[0])
    if user := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(user) / "distserved"
    return Path(f"/tmp/distserved-{os.getuid()}")


@contextmanager
def owned(path: Path) -> Iterator[RunDir]:
    """Hold the run directory: make it, lock it, and clear what a dead owner left.

    Raises:
        RunDirBusy: a live daemon holds it.
        RunDirUnusable: it cannot be made or used.
    """
    run_dir = RunDir(path)
    _make(run_dir)
    with _open_lock(run_dir) as lock:
        _take(lock.fileno(), run_dir)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        _sweep(run_dir)
        try:
            yield run_dir
        finally:
            _sweep(run_dir)


def _make(run_dir: RunDir) -> None:
    if len(os.fsencode(run_dir.worker_socket)) > MAX_SOCKET_PATH:
        raise RunDirUnusable(f"run directory {run_dir.path} is too long for a socket's path")
    try:
        if not run_dir.path.is_dir():
            run_dir.path.mkdir(parents=True)
            run_dir.path.chmod(MODE)  # whatever the umask
        owner = run_dir.path.stat().st_uid
    except OSError as error:
        raise RunDirUnusable(f"run directory {run_dir.path}: {error.strerror}") from error
    if owner != os.getuid():
        raise RunDirUnusable(f"run directory {run_dir.path} belongs to user {owner}")


def _open_lock(run_dir: RunDir) -> TextIO:
    try:
        return open(run_dir.lock_file, "a+", encoding="ascii")
    except OSError as error:
        raise RunDirUnusable(f"{run_dir.lock_file}: {error.strerror}") from error


def _take(descriptor: int, run_dir: RunDir) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = run_dir.lock_file.read_text(encoding="ascii").strip() or "unknown"
        raise RunDirBusy(
            f"run directory {run_dir.path} is held by the daemon with process id {holder}"
        ) from error


def _sweep(run_dir: RunDir) -> None:
    weights = run_dir.path.glob("w" + "[0-9a-f]" * _DIGITS + "*")  # and the locks of the sockets
    for leftover in (run_dir.worker_socket, run_dir.admin_socket, *weights):
        try:
            leftover.unlink(missing_ok=True)
        except OSError as error:
            raise RunDirUnusable(f"{leftover}: {error.strerror}") from error
