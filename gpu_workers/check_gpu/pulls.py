"""Stages: blocks pulled out of another process's pools, in all pairings of shapes, and its death.

On a GPU by way of the host's memory, too. What arrives is compared byte for byte. When a pull is
reported its source is overwritten at once, as it would be by the next prompt: a pull that is
reported too early shows.
"""

import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.exporter import OWNER, Exporter, pattern
from gpu_workers.check_gpu.outcome import Note, require
from gpu_workers.cuda_pairing import VARIABLE
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.step_plan import Pull, PullResult
from ipc.cuda_runtime import CudaError
from ipc.kv_layout import RankLayout, Span
from ipc.vocabulary import DType, KVHandle, WorkerName

NUM_LAYERS, NUM_HEADS, NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 8, 4, 32, 16, 64
SHAPES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
LOOKS = 1_000_000


def check_pulls(backend: Backend, note: Note, shapes: Sequence[tuple[int, int]] = SHAPES) -> str:
    """Every pair of these shapes (tp, pp), exactly."""
    targets = {layout: None for shape in shapes for layout in ranks(*shape, backend.dtype)}
    num_bytes, path = 0, ""
    with Exporter(backend.exporter_command) as exporter:
        for tp, pp in shapes:
            moved, path = _check_source(backend, exporter, (tp, pp), targets)
            note(
                f"tp {tp}, pp {pp}",
                f"{moved} bytes equal in {len(targets)} kinds of ranks, by way of: {path}",
            )
            num_bytes += moved
        if backend.is_gpu:
            note("by way of the host", f"{_check_bounce(backend, exporter)} bytes equal")
    return (
        f"{len(shapes)} shapes into {len(targets)} kinds of ranks, {num_bytes / 2**20:.0f} MiB, "
        f"all equal, by way of: {path}"
    )


def check_death(backend: Backend, note: Note) -> str:
    """The exporter is killed while its pool is open: we part from it and pull from the next."""
    whole = ranks(1, 1, backend.dtype)
    ours = backend.exchange(whole[0], "importer")
    for epoch in (1, 2):
        ours.pool.zero_()
        with Exporter(backend.exporter_command) as exporter:
            introduce(ours, exporter.make(whole), whole, epoch)
            exporter.fill(epoch)
            blocks, into = _scattered(ours.layout, epoch)
            pull(ours, blocks, into, epoch)
            _compare(ours, whole, (blocks, into), epoch)
            ours.begin(_pull(blocks, into, epoch))
            exporter.kill()
            began_s = time.monotonic()
            ours.unmap_instance(OWNER, epoch)
            note(f"parted from exporter {epoch}, s", round(time.monotonic() - began_s, 4))
            require(not ours.knows(OWNER, epoch), "the dead exporter's pool is still known")
            require(len(ours.finished()) == 1, "the pull that was under way was lost")
    backend.release(ours)
    outlives = _outlives(backend)
    note("memory outlives its owner", outlives)
    return f"two exporters killed while their pools were open, pulled from again; {outlives}"


@contextmanager
def by_way_of_host() -> Iterator[None]:
    """Exchanges that are made meanwhile pull as if GPUs did not share their memory."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "host"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _outlives(backend: Backend) -> str:
    """Whether a pool is read rightly through a mapping whose owner has been killed: the driver's
    practice, on which weights rest that several workers hold. An error is an answer, too.

    Raises:
        CheckFailed: it gives other bytes, and no error.
    """
    whole = ranks(1, 1, backend.dtype)
    ours = backend.exchange(whole[0], "importer")
    blocks, into = _scattered(ours.layout, 0)
    with Exporter(backend.exporter_command) as exporter:
        introduce(ours, exporter.make(whole), whole)
        exporter.fill(3)
        exporter.kill()
        try:
            if pull(ours, blocks, into).is_lost:
                return "no, its pool was carried over by its owner"
            pulled = ours.pool.cpu()
        except (CudaError, RuntimeError, TimeoutError) as error:
            return f"no, it cannot be read: {error}"
    expected = pattern(ours.layout, 3)
    same = all(torch.equal(pulled[b], expected[a]) for a, b in zip(blocks, into, strict=True))
    require(same, "the memory of an exporter that was killed gives other bytes, and no error")
    ours.unmap_instance(OWNER, 1)
    backend.release(ours)
    return "its memory outlives an exporter"


def ranks(tp: int, pp: int, dtype: DType) -> list[RankLayout]:
    """The pools of an instance of that shape."""
    heads, layers = NUM_HEADS // tp, NUM_LAYERS // pp
    return [
        RankLayout(
            layers=Span(stage * layers, (stage + 1) * layers),
            heads=Span(rank * heads, (rank + 1) * heads),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            head_dim=HEAD_DIM,
            dtype=dtype,
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def introduce(
    ours: OwnExchange, descriptors: Sequence[int], layouts: Sequence[RankLayout], epoch: int = 1
) -> None:
    """Open an exporter's pools."""
    for rank, (descriptor, layout) in enumerate(zip(descriptors, layouts, strict=True)):
        ours.map_peer(WorkerName(OWNER, 0, rank), epoch, layout, descriptor)


def pull(
    ours: OwnExchange, blocks: Sequence[int], into: Sequence[int], epoch: int = 1
) -> PullResult:
    """From begin to end."""
    ours.begin(_pull(blocks, into, epoch))
    for _ in range(LOOKS):
        if results := ours.finished():
            return results[0]
    raise TimeoutError("the pull did not end")


def _check_source(
    backend: Backend, exporter: Exporter, shape: tuple[int, int], targets: Iterable[RankLayout]
) -> tuple[int, str]:
    """Into every kind of rank; how many bytes, and by which way."""
    theirs, num_bytes, path = ranks(*shape, backend.dtype), 0, ""
    descriptors = exporter.make(theirs)
    for seed, layout in enumerate(targets):
        ours = backend.exchange(layout, "importer")
        introduce(ours, [os.dup(descriptor) for descriptor in descriptors], theirs)
        exporter.fill(seed)
        blocks, into = _scattered(layout, seed)
        pulled = pull(ours, blocks, into)
        require(not pulled.is_lost, "a pull was lost though its source lives")
        num_bytes += pulled.num_bytes
        path = ours.pull_path
        exporter.overwrite()
        ours.unmap_instance(OWNER, 1)  # copies that were reported too early are done now
        _compare(ours, theirs, (blocks, into), seed)
        backend.release(ours)
    for descriptor in descriptors:
        os.close(descriptor)
    return num_bytes, path


def _check_bounce(backend: Backend, exporter: Exporter) -> int:
    """The same where GPUs do not share their memory: from two ranks into one; how many bytes."""
    with by_way_of_host():
        moved, path = _check_source(backend, exporter, (2, 1), ranks(1, 1, backend.dtype))
    require(path == "host", f"pulls came by way of {path} though the host's was asked for")
    return moved


def _compare(
    ours: OwnExchange, theirs: Sequence[RankLayout], moved: tuple[list[int], list[int]], seed: int
) -> None:
    """Every block of ours: what was pulled, and nothing else."""
    blocks, into = moved
    pool, expected = ours.pool.cpu(), pattern(ours.layout, seed)
    wrong = [b for a, b in zip(blocks, into, strict=True) if not torch.equal(pool[b], expected[a])]
    require(
        not wrong,
        f"{len(wrong)} of {len(into)} blocks pulled from {len(theirs)} ranks differ from their "
        f"source, the first of them block {wrong[0] if wrong else None}",
    )
    others = sorted(set(range(NUM_BLOCKS)) - set(into))
    require(not pool[others].any(), "blocks were written that nobody asked for")


def _scattered(layout: RankLayout, seed: int) -> tuple[list[int], list[int]]:
    """Blocks to pull and where to; some follow each other on both sides."""
    draw = random.Random(seed)
    blocks = draw.sample(range(layout.num_blocks - 4), 8)
    into = draw.sample(range(layout.num_blocks - 4), 8)
    following = list(range(layout.num_blocks - 4, layout.num_blocks))
    return blocks + following, into + following


def _pull(blocks: Sequence[int], into: Sequence[int], epoch: int) -> Pull:
    num_tokens = BLOCK_SIZE * len(blocks)
    return Pull(KVHandle(OWNER, epoch, 1, tuple(blocks), num_tokens), tuple(into))
