"""Stage: how fast blocks are pulled out of another process's pool, beside a plain copy.

Blocks of 256 KiB, 2 MiB and 12.5 MiB: scattered, so that each is a copy of its own; side by side,
where copies are merged; gathered into batches; scattered while kernels run on the computing stream,
as they do in a service; and by way of the host's memory. For small runs, from which size on copies
one by one are as quick as batches, which is what pairing GPUs measures too.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.busy import Busy
from gpu_workers.check_gpu.exporter import OWNER, Exporter
from gpu_workers.check_gpu.outcome import Note, require
from gpu_workers.check_gpu.pulls import by_way_of_host, introduce, pull
from gpu_workers.kv_exchange import OwnExchange
from ipc.kv_layout import RankLayout, Span

BLOCK_KIB = (256, 2048, 12800)
SMALL_KIB = (16, 64, 256, 1024)
ALWAYS = 1 << 40
LARGE_KIB = 2048  # from here on a pull must be about as fast as a copy
LEAST_SHARE = {True: 0.8, False: 0.01}  # of a copy: on a GPU; and where others take turns on cores
POOL_BYTES = {True: 512 << 20, False: 100 << 20}
SMALL_POOL_BYTES = 64 << 20
ROUNDS = 5


def check_bandwidth(
    backend: Backend, note: Note, blocks_kib: Sequence[int] = BLOCK_KIB, pool_bytes: int = 0
) -> str:
    """GB/s by block size and kind. Fails where large blocks are much slower than a copy."""
    pool_bytes = pool_bytes or POOL_BYTES[backend.is_gpu]
    shares, speeds = {}, {}
    with Exporter(backend.exporter_command) as exporter:
        for kib in blocks_kib:
            race = _Race(backend, exporter, kib, pool_bytes)
            figures = race.speeds()
            note(f"{kib} KiB", figures)
            shares[kib] = figures["share"]
            speeds[kib] = figures["pull_gb_s"]
        if backend.is_gpu:
            for kib in SMALL_KIB:
                race = _Race(backend, exporter, kib, min(pool_bytes, SMALL_POOL_BYTES))
                note(f"runs of {kib} KiB", race.both_ways())
    require_fast(shares, LEAST_SHARE[backend.is_gpu])
    return "GB/s of pulls: " + ", ".join(f"{kib} KiB {gb_s:.1f}" for kib, gb_s in speeds.items())


def require_fast(shares: Mapping[int, float], least_share: float) -> None:
    """Raises CheckFailed: large blocks, by their KiB, do not reach that share of a plain copy."""
    for kib, share in shares.items():
        require(
            kib < LARGE_KIB or share >= least_share,
            f"pulls of {kib} KiB reach {share:.0%} of a plain copy, {least_share:.0%} was expected",
        )


class _Race:
    """Pulls of blocks of one size, and copies of as much within our pool; the best of some turns
    each."""

    def __init__(self, backend: Backend, exporter: Exporter, kib: int, pool_bytes: int) -> None:
        self._backend, self._exporter = backend, exporter
        self._layout = _layout(backend, kib, pool_bytes)
        self._half = half = self._layout.num_blocks // 2
        draw = random.Random(0)
        everything = range(self._layout.num_blocks)
        self._scattered = draw.sample(everything, half), draw.sample(everything, half)
        self._side_by_side = list(range(half)), list(range(half, 2 * half))

    def speeds(self) -> dict[str, Any]:
        """GB/s of each kind, and the share of a copy that scattered pulls reach."""
        with self._introduced() as ours:
            copied = self._gb_s(lambda: self._copy(ours))
            pulled = self._gb_s(lambda: pull(ours, *self._scattered))
            found: dict[str, Any] = {
                "pull_gb_s": pulled,
                "copy_gb_s": copied,
                "share": pulled / copied,
                "path": ours.pull_path,
            }
            found["merged_gb_s"] = self._gb_s(lambda: pull(ours, *self._side_by_side))
            if self._backend.is_gpu:
                found |= self._beside_work(ours)
        if self._backend.is_gpu:
            found |= self.both_ways()
            with by_way_of_host():
                found["host_gb_s"] = self._gathered(None)
        return found

    def both_ways(self) -> dict[str, float]:
        """GB/s of scattered blocks, one by one and gathered into one call."""
        ways = {"single_gb_s": 0, "batch_gb_s": ALWAYS}
        return {name: self._gathered(below) for name, below in ways.items()}

    def _gathered(self, batch_below: int | None) -> float:
        with self._introduced(batch_below=batch_below) as ours:
            return self._gb_s(lambda: pull(ours, *self._scattered))

    def _beside_work(self, ours: OwnExchange) -> dict[str, float]:
        busy = Busy(self._backend, self._half * self._layout.block_bytes)
        gb_s = self._gb_s(lambda: pull(ours, *self._scattered), busy.running)
        return {"beside_work_gb_s": gb_s, "work_takes_times": busy.slowdown}

    def _copy(self, ours: OwnExchange) -> None:
        half = self._half
        ours.pool[:half].copy_(ours.pool[half : 2 * half])
        self._backend.synchronize()

    def _gb_s(
        self,
        act: Callable[[], object],
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> float:
        act()  # pages are touched for the first time
        seconds = []
        for _ in range(ROUNDS):
            with beside():
                seconds.append(_seconds(act))
        return self._half * self._layout.block_bytes / 1e9 / min(seconds)

    @contextmanager
    def _introduced(self, **how: Any) -> Iterator[OwnExchange]:
        """A pool of ours that knows one of the exporter's."""
        ours = self._backend.exchange(self._layout, "importer", **how)
        introduce(ours, self._exporter.make([self._layout]), [self._layout])
        try:
            yield ours
        finally:
            ours.unmap_instance(OWNER, 1)
            self._backend.release(ours)


def _layout(backend: Backend, kib: int, pool_bytes: int) -> RankLayout:
    """Blocks of that size: 16 KiB for each plane of a head and layer."""
    planes = kib // 16
    blocks = max(4, pool_bytes // (kib << 10))
    return RankLayout(Span(0, planes), Span(0, 1), blocks, 32, 128, backend.dtype)


def _seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s
