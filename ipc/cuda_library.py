"""Which libcudart to use, and what an operator can do where CUDA cannot be used.

torch's own comes first: two copies of the library share a GPU's context but not what each
remembers of errors and devices. Knows names and words; calls nothing.
"""

import os
import re
from collections.abc import Iterator, Sequence

from ipc.cuda_calls import Code

# torch's library that calls libcudart: looked up there, a call is the one that torch makes.
_TORCH = re.compile(r"/libc10_cuda\.so$")
# Wheels that bring it within torch put a hash in its name: libcudart-9335f6a2.so.12.
_RUNTIME = re.compile(r"/libcudart(-[0-9a-f]+)?\.so(\.[0-9]+)*$")
_SYSTEM = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")

_NO_DRIVER = "install NVIDIA's driver, or give the container its GPUs"
_MPS = "is nvidia-cuda-mps-control -d running, for this user, with this CUDA_MPS_PIPE_DIRECTORY?"
REMEDIES: dict[int, str] = {
    Code.INITIALIZATION_ERROR: "nvidia-smi says whether the driver works",
    Code.STUB_LIBRARY: "take the folder with CUDA's stubs out of LD_LIBRARY_PATH",
    Code.DEVICES_UNAVAILABLE: "nvidia-smi -q -d COMPUTE shows whether a GPU is for one process "
    "alone: several need -c DEFAULT, or MPS",
    Code.NO_DEVICE: "nvidia-smi -L lists the GPUs; is CUDA_VISIBLE_DEVICES empty or wrong?",
    Code.INVALID_DEVICE: "CUDA_VISIBLE_DEVICES names a GPU that is not here",
    Code.SYSTEM_NOT_READY: "GPUs behind NVSwitch need nvidia-fabricmanager to run, of the "
    "driver's version",
    Code.SYSTEM_DRIVER_MISMATCH: "the driver was updated while loaded: reboot, or reload it",
    Code.COMPAT_NOT_SUPPORTED_ON_DEVICE: "take CUDA's compat folder out of LD_LIBRARY_PATH",
    Code.MPS_CONNECTION_FAILED: _MPS,
    Code.MPS_RPC_FAILURE: _MPS,
    Code.MPS_SERVER_NOT_READY: "MPS recovers only when every process that used the GPU has ended",
    Code.MPS_MAX_CLIENTS_REACHED: "fewer workers on a GPU, or no MPS",
    Code.MPS_MAX_CONNECTIONS_REACHED: "fewer workers on a GPU, or no MPS",
    Code.UNKNOWN: "nvidia-smi says whether the driver works; is nvidia-uvm loaded?",
}


def candidates(mapped: Sequence[str] | None = None) -> Iterator[str]:
    """What to try, best first: names and paths for the loader.

    Args:
        mapped: the files of a process, if not of ours.
    """
    paths = _mapped() if mapped is None else mapped
    for kind in (_TORCH, _RUNTIME):
        yield from (path for path in paths if kind.search(path))
    yield from _SYSTEM


def remedy(code: int, *, driver: int, runtime: int) -> str:
    """What to do about an error at start, if we know.

    Args:
        driver: the CUDA version of the driver, as CUDA counts; 0 where there is none.
        runtime: that of the library.
    """
    if driver == 0:
        return f"no driver is loaded here: {_NO_DRIVER}"
    if code == Code.INSUFFICIENT_DRIVER:
        ours = _version(driver)
        return (
            f"the driver is for CUDA {ours}, the library is of {_version(runtime)}: "
            f"update the driver, or install a torch for CUDA {ours}"
        )
    return REMEDIES.get(code, "nvidia-smi and the kernel's log (NVRM) may say more")


def _version(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _mapped() -> list[str]:
    """The files that are mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        fields = (line.rstrip("\n").split(maxsplit=5) for line in maps)
        return sorted({field[5] for field in fields if len(field) == 6 and os.path.isabs(field[5])})
