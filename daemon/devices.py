"""The devices that a daemon may use, by what they are called, and that nobody else uses them.

On a CPU a device is a set of cores: `3`, `0-3`, or several of these joined by `+`. A worker is
pinned to the cores of its device and computes with as many threads. On GPUs it is one of them, by
its number or its UUID, and `0-3` are four. Without a list every worker gets an equal share of all
cores, or the GPU of its number; other programs may have them, too, and nothing is held.
"""

import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from daemon import gpus
from daemon.errors import ConfigError, DeviceTaken
from daemon.gpus import MachineGpu
from ipc.vocabulary import DeviceKind

NVIDIA_DRIVER = Path("/dev/nvidiactl")

_RANGE = re.compile(r"(?P<first>[0-9]{1,5})(-(?P<last>[0-9]{1,5}))?")
_CREDENTIALS = struct.Struct("3i")  # struct ucred

Cores = tuple[int, ...]


class Devices(msgspec.Struct, frozen=True):
    """Those that are named, the first of which is device 0 of a placement: all cores, or all GPUs.

    GPUs are UUIDs. None are named where nothing is.
    """

    cores: tuple[Cores, ...] = ()
    gpus: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.cores) + len(self.gpus)

    @property
    def things(self) -> list[str]:
        """What nobody else is to have."""
        cores = sorted(core for cores in self.cores for core in cores)
        return [*(f"core {core}" for core in cores), *(f"GPU {uuid}" for uuid in self.gpus)]

    def seen_by(self, device: int) -> tuple[int, tuple[str, ...]]:
        """(a worker's device, the GPUs that its process is to see): the device is counted among
        those, which are all that the daemon sees where nothing is said.

        All that are named see each other, so that CUDA can tell which of them have peer access;
        but of instances of MIG a process can only have one.
        """
        if not self.gpus:
            return device, ()
        own = self.gpus[device % len(self.gpus)]  # fewer than workers, where they share
        if own.startswith(gpus.MIG):
            return 0, (own,)
        whole = tuple(uuid for uuid in self.gpus if not uuid.startswith(gpus.MIG))
        return whole.index(own), whole


def read_devices(
    words: Sequence[str],
    kind: DeviceKind,
    find_gpus: Callable[[], list[MachineGpu]] = gpus.list_gpus,
) -> Devices:
    """What is named, for workers that compute on that kind.

    Raises:
        ConfigError: a word names nothing, what this process may not use, or something twice.
    """
    if not words:
        return Devices()
    if kind is DeviceKind.CPU:
        for word in words:
            if gpus.is_uuid(word):
                raise ConfigError(f"devices: {word} is a GPU, and device = cpu takes cores")
    elif kind is DeviceKind.CUDA or NVIDIA_DRIVER.exists() or any(map(gpus.is_uuid, words)):
        return Devices(gpus=gpus.named(words, find_gpus()))
    return Devices(cores=_read_cores(words))


@contextmanager
def held(devices: Devices) -> Iterator[None]:
    """Nobody else on this machine has these while we do.

    Held by a socket with an abstract name for each core and GPU: the kernel gives it to one
    process only, takes it back whatever way that process ends, and no sandbox has to let us write
    anywhere.

    Raises:
        DeviceTaken: another daemon has one; says which process.
    """
    with ExitStack() as stack:
        for thing in devices.things:
            stack.enter_context(_held(thing))
        yield


def _read_cores(words: Sequence[str]) -> tuple[Cores, ...]:
    """The cores of each device."""
    allowed = os.sched_getaffinity(0)
    devices = tuple(_read(word) for word in words)
    taken: dict[int, int] = {}
    for number, (word, cores) in enumerate(zip(words, devices, strict=True)):
        for core in cores:
            if core not in allowed:
                raise ConfigError(
                    f"devices: {word}: there is no core {core} for this process, but "
                    f"{_listed(allowed)}"
                )
            if (other := taken.setdefault(core, number)) != number:
                raise ConfigError(f"devices: {words[other]} and {word} share core {core}")
    return devices


def _read(word: str) -> Cores:
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


def _held(thing: str) -> socket.socket:
    name = f"\0distserved-{thing.lower().replace(' ', '-', 1)}"
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(name)
        holder.listen(1)  # so that others can ask who we are
    except OSError as error:
        holder.close()
        raise DeviceTaken(f"devices: {thing} is used by {_owner(name)}") from error
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
