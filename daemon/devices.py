"""The devices that a daemon may use, by what they are called, and that nobody else uses them.

On a CPU a device is a set of cores: `3`, `0-3`, or several of these joined by `+`. A worker is
pinned to the cores of its device and computes with as many threads. Without a list every worker
gets an equal share of all cores, which other programs may have, too, and nothing is held.
"""

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from daemon.errors import ConfigError, DeviceTaken

_RANGE = re.compile(r"(?P<first>[0-9]{1,5})(-(?P<last>[0-9]{1,5}))?")
_GPU = re.compile(r"GPU-[0-9a-fA-F-]+|MIG-\S+")
_CREDENTIALS = struct.Struct("3i")  # struct ucred

Cores = tuple[int, ...]


def read_devices(words: Sequence[str]) -> list[Cores]:
    """The cores of each device, in the order of the list: the first is device 0 of a placement.

    Raises:
        ConfigError: a word names no cores, cores that this process may not use, or some twice.
    """
    allowed = os.sched_getaffinity(0)
    devices = [_read(word) for word in words]
    taken: dict[int, str] = {}
    for word, cores in zip(words, devices, strict=True):
        for core in cores:
            if core not in allowed:
                raise ConfigError(
                    f"devices: {word}: there is no core {core} for this process, but "
                    f"{_listed(allowed)}"
                )
            if (other := taken.setdefault(core, word)) is not word:
                raise ConfigError(f"devices: {other} and {word} share core {core}")
    return devices


@contextmanager
def held(devices: Iterable[Cores]) -> Iterator[None]:
    """Nobody else on this machine has these while we do.

    Held by a socket with an abstract name for each core: the kernel gives it to one process only,
    takes it back whatever way that process ends, and no sandbox has to let us write anywhere.

    Raises:
        DeviceTaken: another daemon has one; says which process.
    """
    with ExitStack() as stack:
        for core in sorted(core for cores in devices for core in cores):
            stack.enter_context(_held(core))
        yield


def _read(word: str) -> Cores:
    if _GPU.fullmatch(word):
        raise ConfigError(f"devices: {word}: workers of this version compute on cores, not on GPUs")
    cores: list[int] = []
    for part in word.split("+"):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ConfigError(
                f"devices: {word[:100]!r} is no device: a core such as 3, a range such as 0-3, or "
                "several of them joined by +"
            )
        first = int(found["first"])
        last = int(found["last"] or first)
        if last < first or last - first >= 4096:
            raise ConfigError(f"devices: {word}: {part} is no range of cores")
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"devices: {word}: a core is in it twice")
    return tuple(cores)


def _held(core: int) -> socket.socket:
    name = f"\0distserved-core-{core}"
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(name)
        holder.listen(1)  # so that others can ask who we are
    except OSError as error:
        holder.close()
        raise DeviceTaken(f"devices: core {core} is used by {_owner(name)}") from error
    return holder


def _owner(name: str) -> str:
    """The process that listens there, as the kernel says."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        try:
            asker.setblocking(False)
            asker.connect(name)
            told = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return f"the daemon with process id {_CREDENTIALS.unpack(told)[0]}"
        except OSError:
            return "another daemon"


def _listed(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
