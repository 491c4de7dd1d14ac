"""Collectives of CPU workers: gloo groups that belong to one worker, made without globals.

Workers meet in the store that the rendezvous URL names. Ranks of one stage sum and gather, through
shared memory where all of them have the compiled library, else in a group. The same tp rank of
all stages forms a chain that hidden states pass along.
"""

import os
import re
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch

from gpu_workers import shm_collectives
from gpu_workers.collectives import CollectivesFailed
from gpu_workers.native_build import NativeLibrary
from gpu_workers.rendezvous import MeetingPoint, distributed, meet_at
from ipc.sharding import Shard

TIMEOUT_S = 60.0
NUM_TAGS = 1 << 16

T = TypeVar("T")


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    """What a `ProcessGroupGloo` does for us."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work: ...

    def gather(self, into: list[torch.Tensor], tensor: torch.Tensor, root: int) -> _Work: ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...


class _Stage(Protocol):
    """Sums and gathers as `Collectives` has them; they raise RuntimeError."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None: ...

    def close(self) -> None: ...


class GlooCollectives:
    """One worker's way to the other ranks of its instance.

    Args:
        url: the rendezvous, fresh for every incarnation of the instance; or where it is open.
        shard: who we are.
        hidden_size: the width of hidden states.
        dtype: of all activations.
        timeout_s: how long the others may let us wait, at the rendezvous and in every call.
        library: what sums through shared memory; None is a worker that has it not.

    `sent_bytes` counts the hidden states that went to the next stage.

    Raises:
        CollectivesFailed: the others did not come.
    """

    on_device = None  # the host sums

    def __init__(
        self,
        url: str | MeetingPoint,
        shard: Shard,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_s: float = TIMEOUT_S,
        library: NativeLibrary | None = None,
    ) -> None:
        self.tp, self.tp_rank = shard.parallelism.tp, shard.tp_rank
        self.stage, self._pp = shard.stage, shard.parallelism.pp
        self._shard = shard
        self._who = f"stage {shard.stage}, tp rank {shard.tp_rank}"
        self._timeout = timedelta(seconds=timeout_s)
        self._library = library
        self._received = torch.empty((0, hidden_size), dtype=dtype)
        self._sending: deque[tuple[_Work, torch.Tensor]] = deque()
        self._num_sent = self._num_received = 0
        self.sent_bytes = 0
        self._others: tuple[_Stage, _Group] | None = None
        self._others = self._guarded(lambda: self._meet(url), "joining the instance")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._guarded(lambda: self._stage.all_reduce(x), "a sum")

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        return self._guarded(lambda: self._stage.gather_columns(x), "a gather")

    def send_forward(self, hidden: torch.Tensor) -> None:
        while len(self._sending) >= self._pp:  # no more steps than that are ever under way
            oldest, _ = self._sending.popleft()
            self._guarded(oldest.wait, "sending hidden states")
        copy, tag = hidden.clone(), self._num_sent % NUM_TAGS
        work = self._guarded(
            lambda: self._chain.send([copy], self.stage + 1, tag), "sending hidden states"
        )
        self._sending.append((work, copy))
        self._num_sent += 1
        self.sent_bytes += copy.nbytes

    def receive(self, num_tokens: int) -> torch.Tensor:
        if len(self._received) < num_tokens:
            self._received = self._received.new_empty((num_tokens, self._received.shape[1]))
        into, tag = self._received[:num_tokens], self._num_received % NUM_TAGS
        self._guarded(
            lambda: self._chain.recv([into], self.stage - 1, tag).wait(), "receiving hidden states"
        )
        self._num_received += 1
        return into

    def close(self) -> None:
        self._sending.clear()
        if self._others is not None:
            self._stage.close()
        self._others = None  # gloo's connections end with their last reference

    @property
    def _stage(self) -> _Stage:
        return self._joined()[0]

    @property
    def _chain(self) -> _Group:
        return self._joined()[1]

    def _joined(self) -> tuple[_Stage, _Group]:
        if self._others is None:
            raise CollectivesFailed(f"{self._who}: we have left the instance")
        return self._others

    def _meet(self, url: str | MeetingPoint) -> tuple[_Stage, _Group]:
        """The stage and the chain; a group of one has no connections."""
        at = meet_at(url, self._shard, self._timeout) if isinstance(url, str) else url
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [_device(at.address)]
        options._timeout = self._timeout
        options._threads = 1  # calls come one after the other
        stage = distributed.PrefixStore(f"stage-{self.stage}", at.store)
        chain = distributed.PrefixStore(f"chain-{self.tp_rank}", at.store)
        return self._meet_stage(stage, options), _group(chain, self.stage, self._pp, options)

    def _meet_stage(self, store: Any, options: Any) -> _Stage:
        rank, size, timeout_s = self.tp_rank, self.tp, self._timeout.total_seconds()
        if size > 1:
            shared = shm_collectives.join(store, rank, size, self._library, timeout_s)
            if shared is not None:
                return shared
        return _GlooStage(_group(store, rank, size, options), rank, size)

    def _guarded(self, call: Callable[[], T], what: str) -> T:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            raise CollectivesFailed(f"{self._who}: {what} failed: {_reason(error)}") from error


class _GlooStage:
    """The ranks of a stage in a group of gloo's."""

    def __init__(self, group: _Group, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        if self._rank != 0:
            self._group.gather([], x, 0).wait()
            return None
        rows, width = x.shape
        parts = x.new_empty((self._size, rows, width))
        self._group.gather(list(parts), x, 0).wait()
        return parts.transpose(0, 1).reshape(rows, self._size * width)

    def close(self) -> None:
        """The group ends with its last reference."""


def _group(store: Any, rank: int, size: int, options: Any) -> _Group:
    return cast(_Group, distributed.ProcessGroupGloo(store, rank, size, options))


def _device(address: str) -> object:
    """Listens at that address, unless GLOO_SOCKET_IFNAME names an interface."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return distributed.ProcessGroupGloo.create_default_device()
    return distributed.ProcessGroupGloo.create_device(hostname=address)


def _reason(error: Exception) -> str:
    """The first sentence, without the place in gloo's source."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0].splitlines()[0]
