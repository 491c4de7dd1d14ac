"""The pools of peers that a worker may read, by incarnation, and what of each is its own to pull.

An instance is known when its pools together hold all that is ours to pull. Incarnations are kept
apart: a new one may be opened while plans still name the old one. What a pool is, and how it is
opened, read and closed, is its exchange's to know.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from ipc.kv_layout import LayoutMismatch, Piece, RankLayout, pieces
from ipc.vocabulary import WorkerName

Incarnation = tuple[str, int]
"""An instance and its epoch."""


class Laid(Protocol):
    """A pool that somebody has."""

    @property
    def layout(self) -> RankLayout: ...


P = TypeVar("P", bound=Laid)


class PeerPools(Generic[P]):
    """Those that are open.

    Args:
        ours: the layout of our own pool.
    """

    def __init__(self, ours: RankLayout) -> None:
        self._ours = ours
        self._pools: dict[Incarnation, dict[tuple[int, int], P]] = {}
        self._pieces: dict[Incarnation, list[tuple[P, Piece]]] = {}

    def __iter__(self) -> Iterator[P]:
        for ranks in self._pools.values():
            yield from ranks.values()

    @property
    def incarnations(self) -> list[Incarnation]:
        return list(self._pools)

    def add(self, worker: WorkerName, epoch: int, pool: P) -> None:
        incarnation = (worker.instance, epoch)
        self._pools.setdefault(incarnation, {})[worker.stage, worker.tp_rank] = pool
        self._pieces.pop(incarnation, None)

    def remove(self, instance: str, epoch: int) -> list[P]:
        """Those of an incarnation that has ended, if there are any left."""
        self._pieces.pop((instance, epoch), None)
        return list(self._pools.pop((instance, epoch), {}).values())

    def knows(self, instance: str, epoch: int) -> bool:
        """Whether all of that incarnation's pools that we need are there."""
        if (instance, epoch) not in self._pools:
            return False
        try:
            self.pieces_of(instance, epoch)
        except LayoutMismatch:  # some of its ranks have not been introduced yet
            return False
        return True

    def pieces_of(self, instance: str, epoch: int) -> list[tuple[P, Piece]]:
        """What to copy from which of its pools; worked out once.

        Raises:
            LayoutMismatch: they do not hold all that we need.
        """
        incarnation = (instance, epoch)
        if incarnation not in self._pieces:
            pools = list(self._pools[incarnation].values())
            found = pieces(self._ours, [pool.layout for pool in pools])
            self._pieces[incarnation] = [(pools[piece.source], piece) for piece in found]
        return self._pieces[incarnation]
