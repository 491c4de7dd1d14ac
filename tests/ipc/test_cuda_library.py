"""Which CUDA runtime library is used, and what operators are told where CUDA cannot be used."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ipc.cuda_calls import Code
from ipc.cuda_library import candidates, remedy
from ipc.cuda_runtime import CudaRuntime

LIBRARIES = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"
COMPILER = shutil.which("gcc")
SITE = "/venv/lib/python3.12/site-packages"
MAPPED = [
    "/lib/libc.so.6",
    f"{SITE}/nvidia/cu13/lib/libcudart.so.13",
    f"{SITE}/torch/lib/libc10_cuda.so",
    f"{SITE}/torch/lib/libcudart-9335f6a2.so.12",
    f"{SITE}/other/libcudart_static.so.txt",
]


def test_torchs_own_library_comes_before_others_of_the_process_and_these_before_the_systems() -> (
    None
):
    assert list(candidates(MAPPED)) == [
        f"{SITE}/torch/lib/libc10_cuda.so",
        f"{SITE}/nvidia/cu13/lib/libcudart.so.13",
        f"{SITE}/torch/lib/libcudart-9335f6a2.so.12",
        "libcudart.so.13",
        "libcudart.so.12",
        "libcudart.so",
    ]


@pytest.mark.skipif(
    COMPILER is None or not (LIBRARIES / "libcudart.so").exists(),
    reason="needs CUDA's runtime library and a compiler",
)
def test_calls_are_found_through_the_library_that_torch_links(tmp_path: Path) -> None:
    (tmp_path / "empty.c").touch()
    torchs = tmp_path / "libc10_cuda.so"
    links = ["-Wl,--no-as-needed", f"-L{LIBRARIES}", "-lcudart", f"-Wl,-rpath,{LIBRARIES}"]
    subprocess.run(
        [COMPILER, "-shared", "-o", torchs, tmp_path / "empty.c", *links],
        check=True,
    )
    assert CudaRuntime(ctypes.CDLL(str(torchs))).version >= 12000


def test_what_to_do_is_said_for_every_error_that_has_a_remedy() -> None:
    unknown = remedy(1, driver=13000, runtime=13000)
    for code in set(Code) - {Code.NOT_READY}:
        assert remedy(code, driver=13000, runtime=13000) not in ("", unknown)


def test_a_driver_that_is_too_old_is_told_apart_from_none() -> None:
    assert "no driver" in remedy(Code.INSUFFICIENT_DRIVER, driver=0, runtime=13000)
    old = remedy(Code.INSUFFICIENT_DRIVER, driver=12040, runtime=13000)
    assert "the driver is for CUDA 12.4, the library is of 13.0" in old


def test_gpus_behind_a_switch_need_the_fabric_manager() -> None:
    assert "nvidia-fabricmanager" in remedy(Code.SYSTEM_NOT_READY, driver=13000, runtime=13000)
