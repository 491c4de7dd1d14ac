"""The seam through which prompts' keys and values move between instances.

On CPU: memory files of the peers, mapped here, and plain copies. On GPUs: CUDA IPC on a side
stream. The leader asks for pulls in step plans; the executor begins them; `finished` is polled.
"""

from typing import Protocol

import torch

from gpu_workers.step_plan import Pull, PullResult
from ipc.kv_layout import RankLayout
from ipc.vocabulary import WorkerName


class KVExchange(Protocol):
    """Copies blocks out of other workers' pools into ours."""

    @property
    def pool(self) -> torch.Tensor:
        """Our own pool: [blocks, kv_heads, layers, 2, block_size, head_dim]."""
        ...

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        """Map a peer's pool; takes over the descriptor. Other incarnations stay mapped.

        Raises:
            LayoutMismatch: the peer's blocks cannot be copied into ours; names both values.
            PoolUnavailable: the descriptor is not that pool.
        """
        ...

    def unmap_instance(self, instance: str, epoch: int) -> None:
        """Forget the pools of an incarnation that has ended. Idempotent."""
        ...

    def knows(self, instance: str, epoch: int) -> bool:
        """Whether all of that incarnation's pools that we need are mapped, so that its handles can
        be pulled."""
        ...

    def begin(self, pull: Pull) -> None:
        """Start a pull from an instance that is known."""
        ...

    def finished(self) -> list[PullResult]:
        """Pulls that have ended since the last call."""
        ...


class OwnExchange(KVExchange, Protocol):
    """One whose pool others may read: a worker's own."""

    @property
    def layout(self) -> RankLayout: ...

    @property
    def descriptor(self) -> int:
        """Of the pool, or of how to open it; the daemon forwards it to importers."""
        ...

    @property
    def pull_path(self) -> str:
        """The slowest way by which peers' pools are read; empty without peers."""
        ...

    def close(self) -> None:
        """Part from all peers, whatever is under way and whoever stands still; others may go on
        to read the pool until the process ends."""
        ...


class UnknownPeer(Exception):
    """A pull or a mapping that this exchange has no way to carry out."""
