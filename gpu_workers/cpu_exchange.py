"""KV exchange between CPU workers: peers' memory files mapped here, blocks copied by this thread.

A copy is done when `begin` returns, so there is no completion to wait for; it is reported by
`finished` all the same, so that the leader does not care. With DISTSERVE_VERIFY_PULLS=1 every
copy is compared with its source before it is reported.
"""

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gpu_workers import pull_check
from gpu_workers.peer_pools import PeerPools
from gpu_workers.step_plan import Pull, PullResult
from ipc import kv_shm
from ipc.kv_layout import Piece, RankLayout, check_same_blocks
from ipc.vocabulary import DType, WorkerName

logger = logging.getLogger(__name__)

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
}


class _Peer(NamedTuple):
    layout: RankLayout
    pool: torch.Tensor  # holds the mapping


Parts = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Where to copy from and to, one part of one block at a time: [heads, layers, 2, P, D] each."""


def copy_parts(parts: Parts) -> None:
    """How pulls copy."""
    for source, target in parts:
        target.copy_(source)


class CpuExchange:
    """Owns this worker's pool (a fresh memory file) and maps those of its peers.

    Args:
        copy: how to carry out a pull; tests have slow ones and such that make mistakes.
    """

    def __init__(
        self, layout: RankLayout, label: str, *, copy: Callable[[Parts], None] = copy_parts
    ) -> None:
        self.layout = layout
        self.descriptor = kv_shm.create(layout.pool_bytes, label)
        self._mapping = kv_shm.map_pool(self.descriptor, layout.pool_bytes)
        self._pool = _as_tensor(self._mapping, layout)
        self._peers = PeerPools[_Peer](layout)
        self._finished: list[PullResult] = []
        self._copy = copy
        self._verifies = pull_check.is_asked_for()

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    @property
    def pull_path(self) -> str:
        return "memory" if self._peers.incarnations else ""

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        check_same_blocks(self.layout, layout)
        mapping = kv_shm.map_pool(descriptor, layout.pool_bytes)
        os.close(descriptor)
        self._peers.add(worker, epoch, _Peer(layout, _as_tensor(mapping, layout)))

    def unmap_instance(self, instance: str, epoch: int) -> None:
        self._peers.remove(instance, epoch)

    def knows(self, instance: str, epoch: int) -> bool:
        return self._peers.knows(instance, epoch)

    def begin(self, pull: Pull) -> None:
        started_s = time.monotonic()
        num_bytes = num_different = 0
        for peer, piece in self._peers.pieces_of(pull.handle.owner, pull.handle.epoch):
            self._copy(block_parts(peer.pool, self._pool, piece, pull))
            num_bytes += self.layout.plane_bytes * piece.num_planes * len(pull.into)
            if self._verifies:
                num_different += self._verify(peer.pool, piece, pull)
        self._finished.append(
            PullResult(
                pull.handle.request_id, num_bytes, started_s, time.monotonic(), num_different
            )
        )

    def finished(self) -> list[PullResult]:
        results, self._finished = self._finished, []
        return results

    def close(self) -> None:
        """The memory goes with the last view of it."""
        for incarnation in self._peers.incarnations:
            self.unmap_instance(*incarnation)
        os.close(self.descriptor)

    def _verify(self, source: torch.Tensor, piece: Piece, pull: Pull) -> int:
        """Parts of blocks that differ from their source, which is still held."""
        found = pull_check.num_different(block_parts(source, self._pool, piece, pull))
        if found:
            logger.error(
                "request %d: %d of %d blocks pulled from %s differ from their source",
                pull.handle.request_id,
                found,
                len(pull.into),
                pull.handle.owner,
            )
        return found


def block_parts(source: torch.Tensor, target: torch.Tensor, piece: Piece, pull: Pull) -> Parts:
    """One piece of every block."""
    src_heads = slice(piece.src_head, piece.src_head + piece.num_heads)
    dst_heads = slice(piece.dst_head, piece.dst_head + piece.num_heads)
    src_layers = slice(piece.src_layer, piece.src_layer + piece.num_layers)
    dst_layers = slice(piece.dst_layer, piece.dst_layer + piece.num_layers)
    for src_block, dst_block in zip(pull.handle.block_ids, pull.into, strict=True):
        yield source[src_block, src_heads, src_layers], target[dst_block, dst_heads, dst_layers]


def _as_tensor(mapping: mmap.mmap, layout: RankLayout) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=TORCH_DTYPES[layout.dtype])
    return flat.view(layout.shape)
