"""The compiled kernels are built once, kept safely, and done without where they cannot be had."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_workers import native_build
from gpu_workers.cpu_kernels import CpuKernels
from gpu_workers.engine import build_kernels
from gpu_workers.errors import ModelError
from gpu_workers.models.config import parse_config
from gpu_workers.native_build import (
    ISAS,
    PORTABLE,
    BuildError,
    best_isa,
    cache_directory,
    cpu_flags,
    load,
    native_library,
)
from gpu_workers.native_kernels import NativeKernels

ALL_SOURCES = native_build.SOURCES
CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
    },
    name="tiny",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a source that is compiled in no time, and nothing loaded before."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "kernels.c").write_text("int nothing;\n", encoding="utf-8")
    monkeypatch.setattr(native_build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("DISTSERVE_KERNELS", raising=False)
    native_library.cache_clear()
    yield tmp_path / "cache" / "distserved"
    native_library.cache_clear()


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CC is a script that compiles and leaves a line in a file for each time it did."""
    log = tmp_path / "compiled"
    log.touch()
    script = f'case "$*" in *--version*) ;; *) echo x >> {log};; esac\nexec cc "$@"\n'
    monkeypatch.setenv("CC", write_script(tmp_path / "my-cc", script))
    return log


def write_script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def kernels_of(dtype: torch.dtype = torch.bfloat16) -> NativeKernels | CpuKernels:
    kernels = build_kernels(CONFIG, torch.zeros(2, 1, 1, 2, 16, 64, dtype=dtype), 64)
    assert isinstance(kernels, NativeKernels | CpuKernels)
    return kernels


def test_a_library_is_compiled_once_and_found_again(cache: Path, counting_compiler: Path) -> None:
    first, second = load(PORTABLE), load(PORTABLE)
    assert counting_compiler.read_text() == "x\n"
    assert [path.stat().st_mode & 0o777 for path in libraries(cache)] == [0o700]
    assert first.isa == second.isa == PORTABLE
    assert not list(cache.glob("*.tmp"))


def test_another_source_or_compiler_makes_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(PORTABLE)
    (native_build.SOURCES / "more.c").write_text("int more;\n", encoding="utf-8")
    load(PORTABLE)
    (native_build.SOURCES / "more.h").write_text("int more;\n", encoding="utf-8")
    load(PORTABLE)
    monkeypatch.setenv("CC", write_script(tmp_path / "other-cc", 'exec cc "$@"'))
    load(PORTABLE)
    assert len(libraries(cache)) == 4


def test_processes_that_start_together_compile_once(cache: Path, counting_compiler: Path) -> None:
    code = "from gpu_workers.native_build import PORTABLE, load; load(PORTABLE)"
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(2)]
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    assert counting_compiler.read_text() == "x\n"


def test_a_file_that_others_may_write_is_replaced_and_not_loaded(cache: Path) -> None:
    load(PORTABLE)
    (path,) = libraries(cache)
    path.unlink()  # this process has it mapped: cut short in place, it would end us by a bus error
    path.write_bytes(b"not a library")
    path.chmod(0o777)
    load(PORTABLE)
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.read_bytes().startswith(b"\x7fELF")


def test_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    load(PORTABLE)
    (path,) = libraries(cache)
    elsewhere = path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(elsewhere)
    load(PORTABLE)
    assert not path.is_symlink()


@pytest.mark.parametrize("obstacle", ["a file", "a folder that others may write"])
def test_without_a_cache_of_our_own_the_library_is_built_aside(cache: Path, obstacle: str) -> None:
    cache.parent.mkdir()
    if obstacle == "a file":
        cache.touch()
    else:
        cache.mkdir()
        cache.chmod(0o777)
    load(PORTABLE)
    assert not libraries(cache)


def test_the_cache_is_the_users_own(cache: Path) -> None:
    load(PORTABLE)
    assert cache_directory() == cache
    assert cache.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo broken >&2; exit 1", "my-cc failed: broken"),
        ('case "$*" in *--version*) exit 0;; esac; exit 3', "my-cc failed: exit 3"),
        (None, "cannot be run"),
    ],
)
def test_a_broken_compiler_leaves_torch_and_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str | None,
    reason: str,
) -> None:
    path = tmp_path / "my-cc"
    monkeypatch.setenv("CC", write_script(path, script) if script else str(path))
    with caplog.at_level(logging.WARNING):
        names = [kernels_of().name, kernels_of().name]
    assert all(name.startswith("torch") for name in names)
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_no_compiler_leaves_torch_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(kernels_of(), CpuKernels)
    assert "no C compiler" in caplog.text


def test_a_result_that_does_not_load_leaves_torch_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = 'for to; do :; done; test "$to" = --version || echo x > "$to"'
    monkeypatch.setenv("CC", write_script(tmp_path / "cc", script))
    assert isinstance(kernels_of(), CpuKernels)
    assert len(caplog.records) == 1


def test_a_cpu_without_avx2_leaves_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "cpu_flags", frozenset)
    assert isinstance(kernels_of(), CpuKernels)
    assert "no AVX2" in caplog.text


def test_the_best_instruction_set_with_all_its_flags_is_taken() -> None:
    best, _, avx2 = ISAS
    assert best_isa(best.needs) == best
    assert best_isa(best.needs - {"avx512_bf16"}).name == "avx512"
    assert best_isa(best.needs - {"avx512f"}) == avx2
    with pytest.raises(BuildError):
        best_isa(frozenset({"sse4_2", "avx"}))


@pytest.mark.skipif("avx2" not in cpu_flags(), reason="the CPU has no AVX2")
def test_the_environment_forces_a_kind_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "SOURCES", ALL_SOURCES)
    assert isinstance(kernels_of(), NativeKernels)
    assert isinstance(kernels_of(torch.float16), CpuKernels)
    monkeypatch.setenv("DISTSERVE_KERNELS", "native")
    assert kernels_of().name.startswith("native-avx")
    with pytest.raises(ModelError, match="DISTSERVE_KERNELS"):
        kernels_of(torch.float16)
    monkeypatch.setenv("DISTSERVE_KERNELS", "torch")
    assert isinstance(kernels_of(), CpuKernels)
