"""What lies between two GPUs, and how fast it should be: as the driver's management library says.

NVML knows links where CUDA only ranks them. Without it, or for what it does not know (instances
of MIG, machines that hide their links), nothing is expected here.
"""

import importlib
from contextlib import suppress
from typing import Any

PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one lane in one direction, by generation, after the line's own coding."""


class Links:
    """The links of this machine.

    Args:
        nvml: the library (nvidia-ml-py's `pynvml`), or what has its face; None: there is none.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def bytes_per_s(self, first: str, second: str) -> float | None:
        """Of the best link between two GPUs, in one direction, by their UUIDs as CUDA tells them;
        None: not known."""
        if self._nvml is None:
            return None
        with suppress(self._nvml.NVMLError):
            return self._between(*(self._handle(uuid) for uuid in (first, second)))
        return None

    def _between(self, first: Any, second: Any) -> float | None:
        nvml = self._nvml
        status = nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == nvml.NVML_P2P_STATUS_OK:
            return min(self._nvlinks(first), self._nvlinks(second)) or None
        return min(self._pcie(first), self._pcie(second))

    def _nvlinks(self, handle: Any) -> float:
        """All links of a GPU together, as if they led to the other: with a switch they do."""
        nvml = self._nvml
        fields = [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        count, speed = nvml.nvmlDeviceGetFieldValues(handle, fields)
        if count.nvmlReturn or speed.nvmlReturn:
            return 0.0
        return float(count.value.uiVal * speed.value.uiVal * 1e6)

    def _pcie(self, handle: Any) -> float:
        """The most that card and slot can do: an idle one may be set lower."""
        generation = self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        num_lanes: int = self._nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        newest = max(PCIE_LANE_BYTES_PER_S)
        return num_lanes * PCIE_LANE_BYTES_PER_S[min(generation, newest)]

    def _handle(self, uuid: str) -> Any:
        return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")


def links_here() -> Links:
    """With the library, if it is installed and there is a driver."""
    with suppress(ImportError):
        nvml: Any = importlib.import_module("pynvml")
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return Links(nvml)
    return Links(None)
