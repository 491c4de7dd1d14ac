"""Collectives between threads of one process: each rank of an instance is a thread.

Sums are made in the order of ranks, by one of them, so that all have the same bits, as gloo's are.
A rank that fails breaks the barriers, and the others fail with it instead of waiting.
"""

import queue
import threading
from collections.abc import Sequence
from itertools import pairwise

import torch

from gpu_workers.collectives import CollectivesFailed
from ipc.vocabulary import Parallelism

TIMEOUT_S = 20.0


class _Stage:
    """What the ranks of one stage share."""

    def __init__(self, tp: int) -> None:
        self.barrier = threading.Barrier(tp, timeout=TIMEOUT_S)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * tp
        self.summed = torch.empty(0)


class ThreadCollectives:
    """One rank's end; `of_instance` makes them all."""

    on_device = None

    def __init__(
        self,
        stage: _Stage,
        tp_rank: int,
        before: "queue.Queue[torch.Tensor] | None",
        after: "queue.Queue[torch.Tensor] | None",
    ) -> None:
        self.tp, self.tp_rank = len(stage.parts), tp_rank
        self._stage, self._before, self._after = stage, before, after

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        stage = self._stage
        self._show(x)
        if self.tp_rank == 0:
            stage.summed = torch.stack(stage.parts).sum(0)
        self._wait()
        return x.copy_(stage.summed)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        self._show(x)
        gathered = torch.cat(self._stage.parts, dim=1) if self.tp_rank == 0 else None
        self._wait()
        return gathered

    def send_forward(self, hidden: torch.Tensor) -> None:
        assert self._after is not None
        self._after.put(hidden.clone(), timeout=TIMEOUT_S)

    def receive(self, num_tokens: int) -> torch.Tensor:
        assert self._before is not None
        try:
            hidden = self._before.get(timeout=TIMEOUT_S)
        except queue.Empty as error:
            raise CollectivesFailed("the stage before is silent") from error
        assert len(hidden) == num_tokens
        return hidden

    def close(self) -> None:
        self._stage.barrier.abort()

    def _show(self, x: torch.Tensor) -> None:
        """Make our part visible and wait for all: a copy, since buffers are used again at once."""
        self._stage.parts[self.tp_rank] = x.clone()
        self._wait()

    def _wait(self) -> None:
        try:
            self._stage.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CollectivesFailed("another rank is gone or silent") from error


def of_instance(parallelism: Parallelism) -> Sequence[Sequence[ThreadCollectives]]:
    """One for each worker, by stage and tp rank."""
    tp, pp = parallelism.tp, parallelism.pp
    links: list[list[queue.Queue[torch.Tensor]]] = [
        [queue.Queue() for _ in range(tp)] for _ in range(pp - 1)
    ]
    ends: list[list[queue.Queue[torch.Tensor] | None]] = [[None] * tp, *links, [None] * tp]
    instance = []
    for before, after in pairwise(ends):
        stage = _Stage(tp)
        instance.append([ThreadCollectives(stage, r, before[r], after[r]) for r in range(tp)])
    return instance
