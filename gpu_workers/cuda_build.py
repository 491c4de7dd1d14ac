"""Build FlashInfer's modules ahead, where a CUDA compiler is but perhaps no GPU.

What is built here lies in FlashInfer's cache, `$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer`, and
is found there by the workers, who would else compile for minutes at their first step. Copied to
`flashinfer/data/aot/<module>/<module>.so` it serves machines without a compiler, too.
"""

import argparse
import importlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

ARCHITECTURE = "9.0a"  # Hopper; FLASHINFER_CUDA_ARCH_LIST in the environment says otherwise
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128, 256)
NO_POSITIONS = 0  # FlashInfer's PosEncodingMode.NONE: positions are in q and k already

EXIT_UNAVAILABLE = 69


def main(argv: list[str]) -> int:
    """`python -P -m gpu_workers cuda-build`: one line a module, with its seconds."""
    arguments = _parser().parse_args(argv)
    if shutil.which("nvcc") is None and not Path(_cuda_home(), "bin/nvcc").exists():
        logger.error("no nvcc: neither in PATH nor under %s", _cuda_home())
        return EXIT_UNAVAILABLE
    with tempfile.TemporaryDirectory() as stubs:
        _set_up(Path(stubs))
        try:
            wanted = list(modules(arguments.dtypes, arguments.head_dims, arguments.extras))
        except ImportError as error:
            logger.error("FlashInfer cannot be imported (%s): pip install '.[cuda]'", error)
            return EXIT_UNAVAILABLE
        for name, generate in wanted:
            _build(name, generate)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_workers cuda-build")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument(
        "--extras",
        nargs="*",
        choices=EXTRAS,
        default=["rope", "page", "silu"],
        help="kernels beside attention; norm needs cublasLt.h",
    )
    return parser


def modules(
    dtypes: Iterable[str], head_dims: Iterable[int], extras: Iterable[str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names, and what makes FlashInfer's description of each module."""
    for extra in extras:
        module, function, *arguments = EXTRAS[extra]
        generator = getattr(importlib.import_module(module), function)
        yield extra, partial(generator, *arguments)
    generator = _attention_generator()
    for head_dim, dtype in itertools.product(head_dims, dtypes):
        kinds = [DTYPES[dtype]] * 3  # q, kv, o
        shape = (*kinds, torch.int32, head_dim, head_dim, NO_POSITIONS, False, False, False)
        yield f"attention {dtype} head_dim {head_dim}", partial(generator, "fa2", *shape)


EXTRAS = {
    "rope": ("flashinfer.jit.rope", "gen_rope_module"),
    "page": ("flashinfer.jit.page", "gen_page_module"),
    "silu": ("flashinfer.jit.activation", "gen_act_and_mul_module", "silu"),
    "norm": ("flashinfer.jit.norm", "gen_norm_module"),
}


def _attention_generator() -> Callable[..., Any]:
    """What the wrappers themselves call: since 0.7 a module for equal strides of k and v."""
    prefill = importlib.import_module("flashinfer.prefill")
    primary = getattr(prefill, "_gen_batch_prefill_primary_module", None)
    generator: Callable[..., Any] = primary or prefill.gen_batch_prefill_module
    return generator


def _build(name: str, generate: Callable[[], Any]) -> None:
    started_s = time.monotonic()
    spec = generate()
    is_old = spec.jit_library_path.exists()
    spec.build(verbose=False)  # which 0.6 wants to be told
    took_s, num_bytes = time.monotonic() - started_s, spec.jit_library_path.stat().st_size
    state = "up to date" if is_old else "built"
    logger.info("%s: %s in %.1f s, %d KiB", name, state, took_s, num_bytes >> 10)


def _set_up(stubs: Path) -> None:
    """The environment that FlashInfer reads at import; what is set already stays."""
    environment = os.environ
    environment.setdefault("CUDA_HOME", _cuda_home())
    environment.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    headers = [str(path) for path in map(Path, sys.path) if (path / "nvidia/cu13/include").is_dir()]
    if headers:  # curand and cublasLt come with torch's CUDA packages, not with every toolkit
        own = [f"{path}/nvidia/cu13/include" for path in headers]
        environment["CPATH"] = os.pathsep.join([*own, environment.get("CPATH", "")]).strip(":")
    if not torch.cuda.is_available():  # else the GPU that is there says what it is
        environment.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCHITECTURE)
        _write_driver_stub(stubs)
        extra = environment.get("FLASHINFER_EXTRA_LDFLAGS", "")
        environment["FLASHINFER_EXTRA_LDFLAGS"] = f"{extra} -L{stubs}".strip()


def _write_driver_stub(folder: Path) -> None:
    """Modules are linked against the driver's library, which only machines with a GPU have."""
    command = ["gcc", "-shared", "-x", "c", "-", "-o", str(folder / "libcuda.so")]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], input=b"", check=True)


def _cuda_home() -> str:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
