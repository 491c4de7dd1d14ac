"""Stage: how fast blocks are pulled out of another process's pool, beside a plain copy.

Blocks of 256 KiB, 2 MiB and 12.5 MiB, scattered; and for smaller runs whether copies gathered
into a batch are quicker than one by one, which is what `BATCH_BELOW_BYTES` wants to know.
"""

import random
import time
from collections.abc import Callable
from typing import Any

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.exporter import OWNER, Exporter
from gpu_workers.check_gpu.outcome import Found, require
from gpu_workers.check_gpu.pulls import introduce, pull
from gpu_workers.kv_exchange import OwnExchange
from ipc.kv_layout import RankLayout, Span

BLOCK_KIB = (256, 2048, 12800)
SMALL_KIB = (16, 64, 256, 1024)
ALWAYS = 1 << 40
LARGE_KIB = 2048  # from here on a pull must be about as fast as a copy
LEAST_SHARE = {True: 0.8, False: 0.01}  # of a copy: on a GPU; and where others take turns on cores
POOL_BYTES = {True: 512 << 20, False: 100 << 20}
ROUNDS = 5


def check_bandwidth(backend: Backend) -> Found:
    """GB/s by block size. Fails where large blocks are much slower than a copy."""
    with Exporter(backend) as exporter:
        figures = {f"{kib} KiB": _speeds(backend, exporter, kib) for kib in BLOCK_KIB}
        if backend.is_gpu:
            figures |= {f"batches of {k} KiB": _batched(backend, exporter, k) for k in SMALL_KIB}
    for kib in BLOCK_KIB:
        share = figures[f"{kib} KiB"]["share"]
        require(
            kib < LARGE_KIB or share >= LEAST_SHARE[backend.is_gpu],
            f"pulls of {kib} KiB reach {share:.0%} of a plain copy",
        )
    told = ", ".join(f"{kib} KiB {figures[f'{kib} KiB']['pull_gb_s']:.1f}" for kib in BLOCK_KIB)
    return Found(f"GB/s of pulls: {told}", figures)


def _layout(backend: Backend, kib: int) -> RankLayout:
    """Blocks of that size: 16 KiB for each plane of a head and layer."""
    planes = kib // 16
    blocks = max(4, POOL_BYTES[backend.is_gpu] // (kib << 10))
    return RankLayout(Span(0, planes), Span(0, 1), blocks, 32, 128, backend.dtype)


def _speeds(backend: Backend, exporter: Exporter, kib: int) -> dict[str, float]:
    layout = _layout(backend, kib)
    ours = backend.exchange(layout, "importer")
    introduce(ours, exporter.make([layout]), [layout])
    pulled, copied = _race(backend, layout, ours)
    ours.unmap_instance(OWNER, 1)
    return {"pull_gb_s": pulled, "copy_gb_s": copied, "share": pulled / copied}


def _race(backend: Backend, layout: RankLayout, ours: OwnExchange) -> tuple[float, float]:
    """GB/s of pulls, and of copies of as much within our pool; the best of some turns each."""
    half = layout.num_blocks // 2
    blocks = random.Random(0).sample(range(layout.num_blocks), half)
    into = random.Random(1).sample(range(layout.num_blocks), half)

    def copy() -> None:
        ours.pool[:half].copy_(ours.pool[half : 2 * half])
        backend.synchronize()

    turns = [
        (_seconds(lambda: pull(ours, blocks, into)), _seconds(copy)) for _ in range(1 + ROUNDS)
    ][1:]  # pages are touched for the first time in the first
    gigabytes = half * layout.block_bytes / 1e9
    return gigabytes / min(a for a, _ in turns), gigabytes / min(b for _, b in turns)


def _batched(backend: Backend, exporter: Exporter, kib: int) -> dict[str, float]:
    """GB/s of runs of that size, one by one and gathered."""
    layout = _layout(backend, kib)
    figures: dict[str, float] = {}
    for name, below in (("single_gb_s", 0), ("batched_gb_s", ALWAYS)):
        how: dict[str, Any] = {"batch_below": below}
        ours = backend.exchange(layout, "importer", **how)
        introduce(ours, exporter.make([layout]), [layout])
        figures[name] = _race(backend, layout, ours)[0]
        ours.unmap_instance(OWNER, 1)
    return figures


def _seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s
