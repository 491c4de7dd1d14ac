"""Stage: what is there: device, driver, libraries, compiler, shared memory."""

import ctypes
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import Note
from ipc.cuda_runtime import CudaError, CudaRuntime, CudaUnavailable, load_runtime

PACKAGES = (
    "torch",
    "flashinfer-python",
    "apache-tvm-ffi",
    "nvidia-nccl-cu13",
    "transformers",
    "safetensors",
    "pyzmq",
    "msgspec",
)
HEADERS = ("curand_kernel.h", "cublasLt.h")  # which FA3 and the norms want, and we do not
QUERY = "name,driver_version,memory.total,memory.used,utilization.gpu,clocks.max.sm,clocks.max.mem"
PROCESSES = "pid,used_memory"
ASKING_S = 20.0


def probe(open_backend: Callable[[], Backend], note: Note) -> str:
    """Fails where the device cannot be used at all, after it has told what is there."""
    for name, look in _LOOKS.items():
        note(name, _safely(look))
    backend = open_backend()
    if backend.is_gpu:
        note("free_bytes, total_bytes", _safely(torch.cuda.mem_get_info))
    gpus = ", ".join(_gpus()) or "no GPU"
    return f"{backend.name}; {gpus}; torch {torch.__version__}"


def _safely(look: Callable[[], Any]) -> Any:
    """What it finds, or why it does not: each by itself, so that the others are told."""
    try:
        return look()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _capabilities() -> list[str]:
    count = range(torch.cuda.device_count())
    return [".".join(map(str, torch.cuda.get_device_capability(index))) for index in count]


def _nvidia_smi() -> list[str]:
    """A line for each GPU, then one for each process that has memory there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = (f"--query-gpu={QUERY}", f"--query-compute-apps={PROCESSES}")
    lines = []
    for what in asked:
        said = subprocess.run(
            [program, what, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASKING_S,
            check=False,
        )
        lines += said.stdout.splitlines()
    return lines


def _nccl() -> list[int]:
    if not torch.cuda.is_available():
        return []
    return list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _flashinfer() -> dict[str, Any]:
    """Its import takes seconds; it compiles an addition of its own first where torch lacks one."""
    if _version("flashinfer-python") is None or not torch.cuda.is_available():
        return {}
    began_s = time.monotonic()
    library = importlib.import_module("flashinfer")
    return {"version": library.__version__, "import_s": time.monotonic() - began_s}


def _exchange_api() -> bool:
    """torch's own way of handing tensors to FlashInfer's modules; else tvm-ffi compiles one."""
    return any("dlpack" in name and "exchange" in name for name in dir(torch.Tensor))


def _headers() -> dict[str, str | None]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    folders = [Path(home, "include")]
    folders += [Path(path, "nvidia/cu13/include") for path in sys.path if path]
    return {
        name: next((str(folder) for folder in folders if (folder / name).exists()), None)
        for name in HEADERS
    }


def _free_bytes(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bsize * status.f_bavail


def _peer_access() -> list[list[bool]]:
    """Whether the one GPU (line) reads the other's memory (column) itself."""
    with suppress(CudaUnavailable, CudaError, ctypes.ArgumentError):
        runtime: CudaRuntime = load_runtime()
        count = range(torch.cuda.device_count())
        return [[a == b or runtime.can_access(a, b) for b in count] for a in count]
    return []


def _switches() -> dict[str, str]:
    """What the environment says of all this."""
    prefixes = ("CUDA", "NVIDIA", "NCCL", "FLASHINFER", "TORCH", "PYTORCH", "TVM", "MAX_JOBS")
    names = (*prefixes, "DISTSERVE")
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(names)}


_LOOKS: dict[str, Callable[[], Any]] = {
    "gpus": _gpus,
    "capabilities": _capabilities,
    "nvidia_smi": _nvidia_smi,
    "cuda": lambda: torch.version.cuda,
    "nccl": _nccl,
    "peer_access": _peer_access,
    "flashinfer": _flashinfer,
    "dlpack_exchange": _exchange_api,
    "packages": lambda: {name: _version(name) for name in PACKAGES},
    "nvcc": lambda: shutil.which("nvcc"),
    "ninja": lambda: shutil.which("ninja"),
    "headers": _headers,
    "shm_bytes": lambda: _free_bytes("/dev/shm"),
    "tmp_bytes": lambda: _free_bytes("/tmp"),
    "python": platform.python_version,
    "kernel": platform.release,
    "cores": lambda: len(os.sched_getaffinity(0)),
    "environment": _switches,
}
