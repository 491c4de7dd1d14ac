"""KV exchange between CPU workers: peers' memory files mapped here, blocks copied by this thread.

A copy is done when `begin` returns, so there is no completion to wait for; it is reported by
`finished` all the same, so that the leader does not care.
"""

import mmap
import os
import time
from typing import NamedTuple

import torch

from gpu_workers.step_plan import Pull, PullResult
from ipc import kv_shm
from ipc.kv_layout import Piece, RankLayout, check_same_blocks, pieces
from ipc.vocabulary import DType, WorkerName

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
}


class _Peer(NamedTuple):
    epoch: int
    layout: RankLayout
    mapping: mmap.mmap
    pool: torch.Tensor


class CpuExchange:
    """Owns this worker's pool (a fresh memory file) and maps those of its peers."""

    def __init__(self, layout: RankLayout, label: str) -> None:
        self.layout = layout
        self.descriptor = kv_shm.create(layout.pool_bytes, label)
        self._mapping = kv_shm.map_pool(self.descriptor, layout.pool_bytes)
        self._pool = _as_tensor(self._mapping, layout)
        self._peers: dict[str, dict[tuple[int, int], _Peer]] = {}
        self._pieces: dict[str, list[tuple[torch.Tensor, Piece]]] = {}
        self._finished: list[PullResult] = []

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        check_same_blocks(self.layout, layout)
        mapping = kv_shm.map_pool(descriptor, layout.pool_bytes)
        os.close(descriptor)
        ranks = self._peers.setdefault(worker.instance, {})
        if any(peer.epoch != epoch for peer in ranks.values()):
            self.unmap_instance(worker.instance, next(iter(ranks.values())).epoch)
            ranks = self._peers.setdefault(worker.instance, {})
        ranks[worker.stage, worker.tp_rank] = _Peer(
            epoch, layout, mapping, _as_tensor(mapping, layout)
        )
        self._pieces.pop(worker.instance, None)

    def unmap_instance(self, instance: str, epoch: int) -> None:
        ranks = self._peers.get(instance, {})
        if any(peer.epoch == epoch for peer in ranks.values()):
            # The tensors hold the mappings; both go with the last reference.
            del self._peers[instance]
            self._pieces.pop(instance, None)

    def knows(self, instance: str, epoch: int) -> bool:
        ranks = self._peers.get(instance, {})
        return bool(ranks) and all(peer.epoch == epoch for peer in ranks.values())

    def begin(self, pull: Pull) -> None:
        started_s = time.monotonic()
        num_bytes = 0
        for source, piece in self._pieces_of(pull.handle.owner):
            num_bytes += _copy(source, self._pool, piece, pull)
        self._finished.append(
            PullResult(pull.handle.request_id, num_bytes, started_s, time.monotonic())
        )

    def finished(self) -> list[PullResult]:
        results, self._finished = self._finished, []
        return results

    def _pieces_of(self, instance: str) -> list[tuple[torch.Tensor, Piece]]:
        """What to copy from which of the instance's pools; worked out once per incarnation."""
        if instance not in self._pieces:
            peers = list(self._peers[instance].values())
            self._pieces[instance] = [
                (peers[piece.source].pool, piece)
                for piece in pieces(self.layout, [peer.layout for peer in peers])
            ]
        return self._pieces[instance]


def _copy(source: torch.Tensor, target: torch.Tensor, piece: Piece, pull: Pull) -> int:
    """Copy one piece of every block; returns bytes. Both slices are [heads, layers, 2, P, D]."""
    src_heads = slice(piece.src_head, piece.src_head + piece.num_heads)
    dst_heads = slice(piece.dst_head, piece.dst_head + piece.num_heads)
    src_layers = slice(piece.src_layer, piece.src_layer + piece.num_layers)
    dst_layers = slice(piece.dst_layer, piece.dst_layer + piece.num_layers)
    for src_block, dst_block in zip(pull.handle.block_ids, pull.into, strict=True):
        target[dst_block, dst_heads, dst_layers].copy_(source[src_block, src_heads, src_layers])
    planes = piece.num_heads * piece.num_layers * len(pull.into)
    return planes * target[0, 0, 0].numel() * target.element_size()


def _as_tensor(mapping: mmap.mmap, layout: RankLayout) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=TORCH_DTYPES[layout.dtype])
    return flat.view(layout.shape)
