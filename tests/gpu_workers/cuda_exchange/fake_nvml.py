"""NVIDIA's management library without a driver: what `pynvml` (nvidia-ml-py) has, by its names."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As the library raises."""


@dataclass(frozen=True)
class FakeNvml:
    """A machine whose GPUs are all joined in one way.

    Args:
        uuids: with their prefix.
        nvlinks: of each GPU; None: none, and no peer access by them.
        pcie: generation and lanes.
        names: of their models.
        instances: UUIDs of the instances of those that are split by MIG, by UUID.
    """

    uuids: Sequence[str]
    nvlinks: int | None = None
    pcie: tuple[int, int] = (5, 16)
    names: Sequence[str] = ()
    instances: dict[str, Sequence[str]] | None = None
    fails: bool = False

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_FI_DEV_NVLINK_LINK_COUNT = 91
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self.names[self.uuids.index(handle)] if self.names else "NVIDIA H200"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if self.instances is None:
            raise NVMLError("Not Supported")
        return [int(handle in self.instances)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        found = (self.instances or {})[handle]
        if index >= len(found):
            raise NVMLError("Not Found")
        return found[index]

    def nvmlDeviceGetP2PStatus(self, first: str, second: str, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 5 if self.nvlinks is None else self.NVML_P2P_STATUS_OK

    def nvmlDeviceGetFieldValues(self, handle: str, fields: Sequence[int]) -> list[Any]:
        known = {
            self.NVML_FI_DEV_NVLINK_LINK_COUNT: self.nvlinks,
            self.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: 26562,  # of an H100
        }
        return [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=known[field]))
            for field in fields
        ]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return self.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return self.pcie[1]
