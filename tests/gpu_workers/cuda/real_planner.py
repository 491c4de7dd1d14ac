"""FlashInfer's own planner, compiled for the host: it needs a compiler for CUDA, and no GPU.

The few calls of CUDA's runtime that it makes are answered as an H200 would, and what it sends to
the device is dropped.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from tests.gpu_workers.cuda.flashinfer_planner import MULTIPROCESSORS, Heads

PLAN_BYTES = 8 << 20
NUM_PLAN_FIELDS = 15
HEADERS = ("include", "csrc", "cccl/libcudacxx/include", "cccl/cub", "cccl/thrust")

CALL = """
#include <flashinfer/attention/scheduler.cuh>

#ifdef HAS_UNIFORM_LENGTHS
#define UNIFORM 0,
#else
#define UNIFORM
#endif

extern "C" int plan(size_t room, char* pinned, size_t pinned_bytes, int* queries, int* pages,
                    unsigned rows, unsigned heads, unsigned kv_heads, unsigned dim, unsigned page,
                    int is_captured, long long* told) {
  try {
    flashinfer::PrefillPlanInfo info;
    char* anywhere = reinterpret_cast<char*>(size_t(1) << 40);
    flashinfer::PrefillPlan<int>(anywhere, room, anywhere, pinned, pinned_bytes, info, queries,
                                 pages, queries[rows], rows, heads, kv_heads, dim, dim, page,
                                 is_captured, 2, -1, -1, false, 0, UNIFORM nullptr);
    auto fields = info.ToVector();
    std::copy(fields.begin(), fields.end(), told);
    return int(fields.size());
  } catch (std::exception const&) {
    return 0;
  }
}
"""
RUNTIME = """
#include <cuda_runtime_api.h>

extern "C" {
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount       ? MULTIPROCESSORS
           : attribute == cudaDevAttrComputeCapabilityMajor  ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor  ? 0
                                                             : 227 << 10;  // shared memory
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return ""; }
void** __cudaRegisterFatBinary(void*) { static void* none; return &none; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
}
"""


class RealPlanner:
    """The planner of the library whose sources are in `data`; compiled in `folder`."""

    def __init__(self, data: Path, folder: Path) -> None:
        scheduler = data / "include/flashinfer/attention/scheduler.cuh"
        since_7 = ["-DHAS_UNIFORM_LENGTHS"] if "uniform_q_len" in scheduler.read_text() else []
        (folder / "call.cu").write_text(CALL)
        (folder / "runtime.cpp").write_text(RUNTIME)
        library = folder / "planner.so"
        command = ["nvcc", "-std=c++17", "-cudart", "none", "-Xcompiler", "-fPIC", "-shared"]
        command += [f"-DMULTIPROCESSORS={MULTIPROCESSORS}", *since_7]
        command += [f"-I{data / header}" for header in HEADERS]
        sources = [str(folder / "call.cu"), str(folder / "runtime.cpp")]
        subprocess.run([*command, *sources, "-o", str(library)], check=True, capture_output=True)
        self._plan = ctypes.CDLL(str(library)).plan
        self._pinned = ctypes.create_string_buffer(PLAN_BYTES)

    def plan(
        self,
        num_new: Sequence[int],
        num_pages: Sequence[int],
        heads: Heads,
        page_size: int,
        *,
        is_captured: bool,
        room: int,
    ) -> list[int] | None:
        """All numbers of a plan, its last one whether the batch is divided; None where `room` does
        not do."""
        rows = len(num_new)
        starts = (ctypes.c_int * (rows + 1))(*accumulate(num_new, initial=0))
        pages = (ctypes.c_int * (rows + 1))(*accumulate(num_pages, initial=0))
        told = (ctypes.c_longlong * NUM_PLAN_FIELDS)()
        num_told = self._plan(
            ctypes.c_size_t(room),
            self._pinned,
            ctypes.c_size_t(PLAN_BYTES),
            starts,
            pages,
            rows,
            *(heads.queries, heads.kv, heads.dim, page_size),
            int(is_captured),
            told,
        )
        return list(told) if num_told else None


def has_compiler() -> bool:
    return shutil.which("nvcc") is not None
