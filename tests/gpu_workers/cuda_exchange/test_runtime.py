"""The calls of CUDA's runtime library: which one is loaded, and how its errors are told."""

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch

from ipc.cuda_runtime import CudaError, CudaRuntime, CudaUnavailable, load_runtime
from ipc.kv_cuda import PoolHandle, as_bytes, read_handle, rounded, write_handle
from ipc.kv_shm import PoolUnavailable
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

TOOLKIT = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
LIBRARY = TOOLKIT / "lib64/libcudart.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason="needs CUDA's runtime library")
def test_the_real_library_has_every_call_and_its_errors_have_names_C15() -> None:
    runtime = CudaRuntime(ctypes.CDLL(str(LIBRARY)))
    with pytest.raises(CudaError, match=r"cudaIpcCloseMemHandle: cudaError\w+ \(\d+\): \w+"):
        runtime.close(4096)


@pytest.mark.skipif(not LIBRARY.exists(), reason="needs CUDA's runtime library")
def test_without_a_gpu_the_real_library_is_refused_with_cause_and_remedy() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CudaUnavailable) as refused:
        load_runtime([str(LIBRARY)])
    told = str(refused.value)
    assert re.match(r"CUDA cannot be used here: cudaGetDeviceCount: cudaError\w+ \(\d+\): \w", told)
    assert ": install NVIDIA's driver" in told or "nvidia-smi" in told


def test_a_library_that_lacks_a_call_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(CudaUnavailable, match=r"cudart.so lacks a call: .*cudaRuntimeGetVersion"):
        load_runtime(["libcudart.so"])


def test_where_no_library_can_be_loaded_that_is_said() -> None:
    with pytest.raises(CudaUnavailable, match=r"^no libcudart.so.13 or .12 can be loaded$"):
        load_runtime(["/nowhere/libcudart.so"])


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
    memory = ctypes.create_string_buffer(b"abc", 3)
    view = as_bytes(ctypes.addressof(memory), 3, torch.device("cpu"))
    view[0] = ord("x")
    del view
    assert memory.raw == b"xbc"
