"""The GPUs of this machine by what they are called: numbers, UUIDs, instances of MIG.

Asked of the driver's management library (NVML), which is loaded only where GPUs are named: the
daemon never asks CUDA. Numbers are those of `nvidia-smi`, or places in CUDA_VISIBLE_DEVICES where
that is set. What comes out are UUIDs, which mean the same in whatever order CUDA counts.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from daemon.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"
_BY_UUID = re.compile(r"(GPU|MIG)-\S*")
_RANGE = re.compile(r"(?P<first>[0-9]{1,4})(-(?P<last>[0-9]{1,4}))?")


class MachineGpu(msgspec.Struct, frozen=True):
    """One of this machine; `instances` are the UUIDs of its parts, if it is split by MIG."""

    number: int
    uuid: str
    name: str
    instances: tuple[str, ...] | None = None

    def __str__(self) -> str:
        parts = ", ".join(self.instances or ()) or "nothing"
        split = f", split into {parts}" if self.is_split else ""
        return f"GPU {self.number} ({self.uuid}, {self.name}{split})"

    @property
    def is_split(self) -> bool:
        return self.instances is not None


def list_gpus(nvml: Any = None) -> list[MachineGpu]:
    """All of this machine that its driver shows us, in the order of `nvidia-smi`.

    Args:
        nvml: nvidia-ml-py, or what has its face; None: it is imported.

    Raises:
        ConfigError: it is not installed, or there is no driver.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise ConfigError(
                "devices: GPUs cannot be looked up, since nvidia-ml-py is not installed: pip "
                "install 'distserved[cuda]' (for cores: device = cpu)"
            ) from error
    try:
        nvml.nvmlInit()
        try:
            return [_described(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise ConfigError(
            f"devices: GPUs cannot be looked up: NVIDIA's driver says: {error} (for cores: device "
            "= cpu)"
        ) from error


def is_uuid(word: str) -> bool:
    """Whether it can only be a GPU's name."""
    return _BY_UUID.fullmatch(word) is not None


def named(
    words: Sequence[str], gpus: Sequence[MachineGpu], environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The UUIDs of those that are named, in that order.

    Args:
        gpus: all of the machine.
        environment: may leave fewer of them to us.

    Raises:
        ConfigError: a word names none, one that is not to be used, or one that is named already.
    """
    ours = visible(gpus, environment)
    found: dict[str, str] = {}
    for word in words:
        for uuid in _named(word, ours):
            if uuid in found:
                raise ConfigError(f"devices: {found[uuid]} and {word} are both {uuid}")
            found[uuid] = word
    return tuple(found)


def visible(gpus: Sequence[MachineGpu], environment: Mapping[str, str]) -> list[MachineGpu]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order and counted anew. As CUDA does, whatever
    comes after a word that names nothing is left out.

    Raises:
        ConfigError: its numbers may mean other GPUs to CUDA than to us.
    """
    if VISIBLE not in environment:
        return list(gpus)
    left: list[MachineGpu] = []
    for word in environment[VISIBLE].split(","):
        one = _visible(word.strip(), gpus, environment)
        if one is None:
            break
        left.append(msgspec.structs.replace(one, number=len(left)))
    return left


def _visible(
    word: str, gpus: Sequence[MachineGpu], environment: Mapping[str, str]
) -> MachineGpu | None:
    if not word.isdecimal():
        return next(iter(_by_uuid(word, gpus)), None) if is_uuid(word) else None
    models = {gpu.name for gpu in gpus}
    if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ConfigError(
            f"devices: {VISIBLE} counts GPUs of different models by their speed, since "
            "CUDA_DEVICE_ORDER is not PCI_BUS_ID: which they are cannot be told; set that, or "
            "put UUIDs there"
        )
    return gpus[int(word)] if int(word) < len(gpus) else None


def _named(word: str, ours: Sequence[MachineGpu]) -> list[str]:
    if is_uuid(word):
        chosen = _by_uuid(word, ours)
        if len(chosen) != 1:
            several = f"{len(chosen)} GPUs begin like that" if chosen else "there is no such GPU"
            raise ConfigError(f"devices: {word}: {several} here, but {_listed(ours)}")
    elif numbers := _RANGE.fullmatch(word):
        chosen = _numbered(word, numbers, ours)
    else:
        raise ConfigError(
            f"devices: {word[:100]!r} is no GPU: a number such as 0, a range such as 0-3, or a "
            "UUID or its beginning, such as GPU-8932f937 or MIG-..."
        )
    for gpu in chosen:
        if gpu.is_split:
            raise ConfigError(
                f"devices: {word}: {gpu}; one of its instances is to be named, by its UUID"
            )
    return [gpu.uuid for gpu in chosen]


def _numbered(word: str, numbers: re.Match[str], ours: Sequence[MachineGpu]) -> list[MachineGpu]:
    first = int(numbers["first"])
    last = int(numbers["last"] or first)
    if last < first:
        raise ConfigError(f"devices: {word} is no range of GPUs")
    if last >= len(ours):
        raise ConfigError(f"devices: {word}: there is no GPU {last} here, but {_listed(ours)}")
    return list(ours[first : last + 1])


def _by_uuid(word: str, gpus: Sequence[MachineGpu]) -> list[MachineGpu]:
    """Those whose UUID begins like that; instances as devices of their own."""
    if not word.startswith(MIG):
        return [gpu for gpu in gpus if gpu.uuid.startswith(word)]
    return [part for gpu in gpus for part in _parts(gpu) if part.uuid.startswith(word)]


def _parts(gpu: MachineGpu) -> list[MachineGpu]:
    if gpu.uuid.startswith(MIG):
        return [gpu]
    uuids = gpu.instances or ()
    return [msgspec.structs.replace(gpu, uuid=uuid, instances=None) for uuid in uuids]


def _listed(gpus: Sequence[MachineGpu]) -> str:
    return ", ".join(map(str, gpus)) or "none at all"


def _described(nvml: Any, number: int) -> MachineGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    is_split = False
    with suppress(nvml.NVMLError):  # most models cannot be
        is_split = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    return MachineGpu(
        number,
        nvml.nvmlDeviceGetUUID(handle),
        nvml.nvmlDeviceGetName(handle),
        tuple(_instances(nvml, handle)) if is_split else None,
    )


def _instances(nvml: Any, handle: Any) -> Iterator[str]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # none has that number
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield nvml.nvmlDeviceGetUUID(part)
