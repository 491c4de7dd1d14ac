"""The seam between a model's shards: sums within a stage, hidden states between stages.

A collectives object belongs to one worker and is passed in, never global. CPU workers talk by
gloo, GPUs by NCCL, tests by threads of one process. Calls of all ranks of a stage must come in
the same order; step plans see to that. Every call is bounded: it raises CollectivesFailed when
another rank is gone or silent for too long.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class CollectivesFailed(Exception):
    """Another rank of the instance is gone or silent; the instance can only end as a whole."""


class DeviceCollectives(Protocol):
    """What more there is where the device does it all, in the order of its stream, and the host
    never waits: a graph can hold a sum, and a drawn token need not come to the host to be passed
    on."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Make x on every rank of the stage what it is on tp rank 0."""
        ...

    def assemble(self) -> None:
        """Wait on the host until all ranks of the stage have come here, however long they load:
        the sums that follow are bounded."""
        ...

    def close_before(self, close: Callable[[], None]) -> None:
        """Have something that holds our calls closed before we are."""
        ...


class Collectives(Protocol):
    """What one rank needs of the others of its instance."""

    @property
    def tp(self) -> int: ...

    @property
    def tp_rank(self) -> int: ...

    @property
    def on_device(self) -> DeviceCollectives | None:
        """These, where the device carries them out; None where the host has a hand in it."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the stage's ranks, on each of them; in place where x allows it."""
        ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """(N, W) of each rank of the stage, side by side, (N, tp * W) on rank 0; None elsewhere."""
        ...

    def send_forward(self, hidden: torch.Tensor) -> None:
        """(T, hidden) to the same rank of the next stage. Does not wait for it to arrive; the
        tensor may be changed at once."""
        ...

    def receive(self, num_tokens: int) -> torch.Tensor:
        """(num_tokens, hidden) from the same rank of the stage before. The caller may change it;
        the next call may use its memory again."""
        ...

    def close(self) -> None:
        """Leave the instance: what other ranks still ask of this one fails there."""
        ...


class Alone:
    """The only worker of its instance."""

    tp, tp_rank = 1, 0

    @property
    def on_device(self) -> DeviceCollectives:
        return self

    def broadcast(self, x: torch.Tensor) -> None:
        """Nobody else needs it."""

    def assemble(self) -> None:
        """Nobody else is to come."""

    def close_before(self, close: Callable[[], None]) -> None:
        """What ends here ends with the process."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def send_forward(self, hidden: torch.Tensor) -> None:
        raise AssertionError("there is no next stage")

    def receive(self, num_tokens: int) -> torch.Tensor:
        raise AssertionError("there is no stage before")

    def close(self) -> None:
        """Nobody is left behind."""
