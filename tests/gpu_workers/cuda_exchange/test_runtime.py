"""The calls of CUDA's runtime: their declared arguments are the header's, their errors are told."""

import ctypes
import os
import re
from pathlib import Path

import pytest

from ipc import cuda_runtime
from ipc.cuda_runtime import SIGNATURES, CopyAttributes, CudaError, CudaRuntime, IpcHandle
from ipc.kv_cuda import PoolHandle, as_bytes, read_handle, rounded, write_handle
from ipc.kv_shm import PoolUnavailable
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

HEADER = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include/cuda_runtime_api.h"
LIBRARY = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64/libcudart.so"
KINDS = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "enum cudaMemcpyKind": ctypes.c_int,
    "cudaStream_t": ctypes.c_void_p,
    "cudaEvent_t": ctypes.c_void_p,
    "void *": ctypes.c_void_p,
    "const void *": ctypes.c_void_p,
    "cudaIpcMemHandle_t": IpcHandle,
    "int *": ctypes.POINTER(ctypes.c_int),
    "float *": ctypes.POINTER(ctypes.c_float),
    "size_t *": ctypes.POINTER(ctypes.c_size_t),
    "const size_t *": ctypes.POINTER(ctypes.c_size_t),
    "void **": ctypes.POINTER(ctypes.c_void_p),
    "void *const *": ctypes.POINTER(ctypes.c_void_p),
    "const void *const *": ctypes.POINTER(ctypes.c_void_p),
    "cudaStream_t *": ctypes.POINTER(ctypes.c_void_p),
    "cudaEvent_t *": ctypes.POINTER(ctypes.c_void_p),
    "cudaIpcMemHandle_t *": ctypes.POINTER(IpcHandle),
    "struct cudaMemcpyAttributes *": ctypes.POINTER(CopyAttributes),
}


def declared(name: str) -> tuple[object, ...]:
    """The types of a function's arguments as the header has them."""
    found = re.search(rf"CUDARTAPI {name}\((.*)\);", HEADER.read_text(encoding="utf-8"))
    assert found, f"{name} is not in {HEADER}"
    arguments = re.sub(r"\s*__dv\([^)]*\)", "", found[1]).split(", ")
    return tuple(KINDS[re.sub(r"\w+$", "", argument).strip()] for argument in arguments)


@pytest.mark.skipif(not HEADER.exists(), reason="needs CUDA's headers")
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_of_every_call_are_those_of_the_header(name: str) -> None:
    assert SIGNATURES[name] == declared(name)


@pytest.mark.skipif(not LIBRARY.exists(), reason="needs CUDA's runtime library")
def test_the_real_library_has_every_call_and_its_errors_have_names_C15() -> None:
    runtime = CudaRuntime(ctypes.CDLL(str(LIBRARY)))
    with pytest.raises(CudaError, match=r"cudaIpcCloseMemHandle: cudaError\w+ \(\d+\): \w+"):
        runtime.close(4096)


def test_a_library_that_lacks_a_call_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(cuda_runtime.CudaUnavailable, match="is too old"):
        cuda_runtime.load_runtime()


def test_an_error_names_the_call_its_number_and_its_name() -> None:
    library = FakeCudart()
    runtime = CudaRuntime(library)
    library.fails["cudaFree"] = 700
    with pytest.raises(CudaError, match=r"cudaFree: cudaErrorIllegalAddress \(700\): as the test"):
        runtime.free(0)


@pytest.mark.parametrize("call", ["cudaFree", "cudaEventQuery"])
def test_a_call_that_fails_leaves_no_error_behind_for_torch_to_find(call: str) -> None:
    """Torch asks the same library for its last error after every kernel that it starts."""
    library = FakeCudart()
    runtime = CudaRuntime(library)
    event, stream = runtime.make_event(), runtime.make_stream()
    runtime.record(event, stream)
    library.fails[call] = 600 if call == "cudaEventQuery" else 1
    if call == "cudaFree":
        with pytest.raises(CudaError):
            runtime.free(0)
    else:
        assert not runtime.is_over(event)
    assert library.cudaGetLastError() == 0


def test_memory_is_zeroed_by_the_time_it_is_given_out() -> None:
    runtime = CudaRuntime(library := FakeCudart())
    address = runtime.allocate(1 << 12)
    ctypes.memset(address, 7, 16)
    library.finish(0)  # nothing is left to be done that would undo this
    assert ctypes.string_at(address, 16) == bytes([7]) * 16


def test_pools_are_whole_allocations_of_two_mebibytes_C13() -> None:
    assert [rounded(size) for size in (1, 2 << 20, (2 << 20) + 1)] == [2 << 20, 2 << 20, 4 << 20]


def test_a_handle_travels_in_a_memory_file() -> None:
    handle = PoolHandle(bytes(range(64)), 2 << 20, "GPU-1234")
    descriptor = write_handle(handle, "prefill-0")
    assert read_handle(descriptor) == handle
    os.close(descriptor)


@pytest.mark.parametrize(
    "content", [b"", bytes(4096), b"[]", b'{"handle": "AA==", "num_bytes": 1}']
)
def test_what_is_no_handle_is_refused(content: bytes) -> None:
    descriptor = os.memfd_create("other")
    os.write(descriptor, content)
    with pytest.raises(PoolUnavailable, match="not the handle of a pool in a GPU's memory"):
        read_handle(descriptor)
    os.close(descriptor)


def test_views_of_memory_do_not_own_it() -> None:
    import torch

    memory = ctypes.create_string_buffer(b"abc", 3)
    view = as_bytes(ctypes.addressof(memory), 3, torch.device("cpu"))
    view[0] = ord("x")
    del view
    assert memory.raw == b"xbc"
