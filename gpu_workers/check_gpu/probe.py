"""Stage: what is there: device, libraries, compiler, shared memory."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
from contextlib import suppress
from typing import Any

import torch

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import Found
from ipc.cuda_runtime import CudaError, CudaRuntime, CudaUnavailable, load_runtime

PACKAGES = ("torch", "flashinfer-python", "transformers", "apache-tvm-ffi")


def probe(backend: Backend) -> Found:
    """Never fails: what is missing shows in the stages that need it."""
    shm = os.statvfs("/dev/shm")
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in PACKAGES},
        "nvcc": shutil.which("nvcc"),
        "shm_bytes": shm.f_bsize * shm.f_bavail,
        "gpus": _gpus(),
        "peer_access": _peer_access(),
    }
    gpus = ", ".join(figures["gpus"]) or "no GPU"
    return Found(f"{backend.name}; {gpus}; torch {torch.__version__}", figures)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _peer_access() -> list[list[bool]]:
    """Whether the one GPU (line) reads the other's memory (column) itself."""
    with suppress(CudaUnavailable, CudaError, ctypes.ArgumentError):
        runtime: CudaRuntime = load_runtime()
        count = range(torch.cuda.device_count())
        return [[a == b or runtime.can_access(a, b) for b in count] for a in count]
    return []
