"""Compile the C files of `native/` into one library with the system's compiler, once, and load it.

The library is kept in the user's cache under a name made of everything that shapes it: sources,
flags, compiler. Several workers may start at once: one builds under a lock, the others wait and
find it. A file that others could have written is never loaded. Whatever fails, the reason is logged
as one warning and the caller does without.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
TIMEOUT_S = 60.0


class BuildError(Exception):
    """The kernels cannot be compiled or must not be loaded; the message says why."""


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: its name, the CPU flags it takes in Linux' spelling, the compiler's."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = Isa("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma"))
_AVX512 = Isa(
    "avx512",
    _AVX2.needs | {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    (*_AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
)
_AVX512_BF16 = Isa("avx512bf16", _AVX512.needs | {"avx512_bf16"}, (*_AVX512.flags, "-mavx512bf16"))
ISAS = (_AVX512_BF16, _AVX512, _AVX2)  # best first
PORTABLE = Isa("portable", frozenset(), ())  # right everywhere, but no faster than torch


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library; its functions are declared by who calls them."""

    isa: Isa
    functions: ctypes.CDLL


@cache
def native_library() -> NativeLibrary | None:
    """The kernels for this CPU, compiled if need be; None, with a warning, if that fails."""
    try:
        isa = best_isa(cpu_flags())
        return load(isa)
    except (BuildError, OSError) as error:
        logger.warning("no compiled kernels, torch's serve: %s", error)
        return None


def cpu_flags() -> frozenset[str]:
    """What the CPU and the kernel offer, in Linux' spelling; empty where that is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    flags = (value for name, _, value in lines if name.strip() == "flags")
    return frozenset(next(flags, "").split())


def best_isa(flags: frozenset[str]) -> Isa:
    """The best instruction set with all its flags there. Raises BuildError if there is none."""
    found = next((isa for isa in ISAS if isa.needs <= flags), None)
    if found is None:
        raise BuildError("the CPU has no AVX2")
    return found


def load(isa: Isa) -> NativeLibrary:
    """The library for that instruction set, from the cache or compiled now.

    Raises:
        BuildError: no compiler, it failed, or the result is not safe to load.
        OSError: the library does not load.
    """
    compiler = _compiler()
    name = f"kernels-{isa.name}-{_digest(compiler, isa)}.so"
    with _directory() as directory:
        path = directory / name
        if not _is_safe(path):
            with _lock(directory):
                if not _is_safe(path):
                    _compile(compiler, isa, path)
        return NativeLibrary(isa, ctypes.CDLL(str(path)))


def cache_directory() -> Path:
    """Where libraries are kept: `distserved` in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "distserved"


def _compiler() -> list[str]:
    """$CC, or the first one found, as the beginning of a command."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise BuildError(f"no C compiler ({', '.join(COMPILERS)}) on the PATH, and CC is not set")
    return [found]


def _digest(compiler: list[str], isa: Isa) -> str:
    files = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    command = " ".join((*compiler, *FLAGS, *isa.flags)).encode()
    parts = (*files, command, _run([*compiler, "--version"]))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compile(compiler: list[str], isa: Isa, path: Path) -> None:
    """Into a temporary name first: `path` appears complete or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(descriptor)
    try:
        sources = map(str, sorted(SOURCES.glob("*.c")))
        _run([*compiler, *FLAGS, *isa.flags, *sources, "-o", name])
        os.chmod(name, stat.S_IRWXU)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    if not _is_safe(path):
        raise BuildError(f"{path} could be written by others")


def _run(command: list[str]) -> bytes:
    """Standard output. Raises BuildError with the first line of what a failure said."""
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise BuildError(f"{command[0]} failed: {said or f'exit {error.returncode}'}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    return done.stdout


@contextmanager
def _directory() -> Iterator[Path]:
    """The cache if it is ours, else one of our own that goes as soon as the library is loaded."""
    try:
        directory = cache_directory()
        directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        is_usable = _is_ours(directory.lstat(), stat.S_ISDIR) and os.access(directory, os.W_OK)
    except (OSError, RuntimeError):  # the latter where there is no home
        is_usable = False
    if is_usable:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="distserved-") as private:
        yield Path(private)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Exclusive among processes; the kernel drops it with its holder."""
    with (directory / "build.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_safe(path: Path) -> bool:
    """Whether a library is there and nobody else could have put or changed it."""
    try:
        return _is_ours(path.lstat(), stat.S_ISREG)
    except OSError:
        return False


def _is_ours(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not others_write
