"""Collectives of GPU workers: NCCL groups that belong to one worker, made without globals.

What is asked here is done on the device, in the order of the computing stream: nothing waits for
it but the stream. Sums and gathers can be captured in graphs. torch's watchdog ends a process whose
call does not come back in time, and with it the instance; of what a graph asks it knows nothing
(pytorch#102542), but the tokens passed on behind it wait with it. NCCL takes no two ranks on one
GPU; those (tests, and trying things out on a small machine) talk by gloo, through the host.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch

from gpu_workers.collectives import CollectivesFailed
from gpu_workers.gloo_collectives import TIMEOUT_S, GlooCollectives
from gpu_workers.rendezvous import MeetingPoint, distributed, meet_at
from ipc.sharding import Shard

logger = logging.getLogger(__name__)

T = TypeVar("T")
MakeGroup = Callable[[Any, int, int, timedelta], Any]
"""(store, rank, size, timeout) -> a process group with the face of `torch.distributed`'s."""

LOAD_TIMEOUT_S = 3600.0  # ranks that never come are the daemon's to notice, which ends us


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of GPUs."""
    # Registering graphs' memory gains nothing for a few rows, and fails on expandable segments
    # (Megatron-LM demands this setting there).
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)


class NcclCollectives:
    """One worker's way to the other ranks of its instance.

    Args:
        at: the instance's rendezvous.
        shard: who we are.
        hidden_size: the width of hidden states.
        dtype: of all activations.
        device: where they are.
        timeout_s: how long the others may let us wait, at the rendezvous and in every call.
        make_group: how ranks connect; tests have another way.

    `sent_bytes` counts the hidden states that went to the next stage.

    Raises:
        CollectivesFailed: the others did not come.
    """

    def __init__(
        self,
        at: MeetingPoint,
        shard: Shard,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
        make_group: MakeGroup = nccl_group,
    ) -> None:
        self.tp, self.tp_rank = shard.parallelism.tp, shard.tp_rank
        self.stage, self._pp = shard.stage, shard.parallelism.pp
        self._who = f"stage {shard.stage}, tp rank {shard.tp_rank}"
        self._received = torch.empty((0, hidden_size), dtype=dtype, device=device)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.sent_bytes = 0
        self._store = at.store
        self._close_before: list[Callable[[], None]] = []
        self._sum, self._gather, self._share = (
            _in_stream(options)
            for options in (
                distributed.AllreduceOptions(),
                distributed.distributed_c10d.AllgatherOptions(),
                distributed.BroadcastOptions(),
            )
        )
        timeout = timedelta(seconds=timeout_s)
        self._groups: tuple[Any, Any] | None = None
        self._groups = self._guarded(lambda: self._meet(timeout, make_group), "joining")

    @property
    def on_device(self) -> "NcclCollectives":
        return self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            self._ask(lambda: self._stage.allreduce([x], self._sum), "a sum")
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """All ranks get all parts, which over NVLink costs no more than if one did."""
        rows, width = x.shape
        parts = x.new_empty((self.tp, rows, width))
        if x.numel():
            whole, own = parts.view(-1, width), x.contiguous()
            self._ask(lambda: self._stage._allgather_base(whole, own, self._gather), "a gather")
        if self.tp_rank != 0:
            return None
        return parts.transpose(0, 1).reshape(rows, self.tp * width)

    def broadcast(self, x: torch.Tensor) -> None:
        self._ask(lambda: self._stage.broadcast([x], self._share), "passing tokens on")

    def assemble(self) -> None:
        """By the store: the bound of a sum is much shorter than a large model takes to load."""
        keys = [f"loaded-{self.stage}-{rank}" for rank in range(self.tp)]
        self._guarded(lambda: self._store.set(keys[self.tp_rank], ""), "loading")
        limit = timedelta(seconds=LOAD_TIMEOUT_S)
        self._guarded(lambda: self._store.wait(keys, limit), "loading")

    def close_before(self, close: Callable[[], None]) -> None:
        self._close_before.append(close)

    def send_forward(self, hidden: torch.Tensor) -> None:
        while len(self._sending) >= self._pp:  # no more steps than that are ever under way
            oldest, _ = self._sending.popleft()
            self._guarded(oldest.wait, "sending hidden states")
        copy = hidden.clone()
        work = self._guarded(
            lambda: self._chain.send([copy], self.stage + 1, 0), "sending hidden states"
        )
        self._sending.append((work, copy))
        self.sent_bytes += copy.nbytes

    def receive(self, num_tokens: int) -> torch.Tensor:
        if len(self._received) < num_tokens:
            self._received = self._received.new_empty((num_tokens, self._received.shape[1]))
        into = self._received[:num_tokens]
        self._guarded(
            lambda: self._chain.recv([into], self.stage - 1, 0).wait(), "receiving hidden states"
        )
        return into

    def close(self) -> None:
        """What others still ask of us fails there; what we asked and is not done is given up."""
        self._sending.clear()
        # An abort waits until no graph holds a call of the group any more (vllm#39846).
        while self._close_before:
            self._close_before.pop()()
        groups, self._groups = self._groups, None
        # Both at once: to give one up may have to wait for calls of the other (pytorch#119797).
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self._give_up, groups or ()))

    def _give_up(self, group: Any) -> None:
        try:
            group.abort()
        except RuntimeError as error:  # why we leave, such as a failed device, is told by others
            logger.warning("%s: a group was not given up: %s", self._who, str(error).split("\n")[0])

    @property
    def _stage(self) -> Any:
        return self._joined()[0]

    @property
    def _chain(self) -> Any:
        return self._joined()[1]

    def _joined(self) -> tuple[Any, Any]:
        if self._groups is None:
            raise CollectivesFailed(f"{self._who}: we have left the instance")
        return self._groups

    def _meet(self, timeout: timedelta, make_group: MakeGroup) -> tuple[Any, Any]:
        """The stage and the chain, connected, which shows that they can be: NCCL does that with the
        first call, and could not in a capture."""

        def make(name: str, rank: int, size: int) -> Any:
            return make_group(distributed.PrefixStore(name, self._store), rank, size, timeout)

        stage = make(f"stage-{self.stage}", self.tp_rank, self.tp)
        chain = make(f"chain-{self.tp_rank}", self.stage, self._pp)
        probe = self._received.new_ones(1, 1)
        if self.tp > 1:
            stage.allreduce([probe]).wait()
        if self.stage > 0:
            chain.recv([probe], self.stage - 1, 0).wait()
        if self.stage + 1 < self._pp:
            chain.send([probe], self.stage + 1, 0).wait()
        return stage, chain

    def _ask(self, call: Callable[[], Any], what: str) -> None:
        """Of the stage, in the order of our stream."""
        if (work := self._guarded(call, what)) is not None:  # None where it is in order already
            self._guarded(work.wait, what)

    def _guarded(self, call: Callable[[], T], what: str) -> T:
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CollectivesFailed(f"{self._who}: {what} failed: {reason}") from error


def _in_stream(options: Any) -> Any:
    """Calls go to the computing stream itself, captured or not, instead of to one of NCCL's that
    waits for it: as `torch.distributed.all_reduce` has it where it is not asked to be async."""
    options.asyncOp = False
    return options


class StagedCollectives:
    """Ranks that talk on the host, of tensors that are on a device."""

    on_device = None

    def __init__(self, others: GlooCollectives, device: torch.device) -> None:
        self._others = others
        self._device = device
        self.tp, self.tp_rank = others.tp, others.tp_rank

    @property
    def sent_bytes(self) -> int:
        return self._others.sent_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._others.all_reduce(x.cpu()))

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = self._others.gather_columns(x.cpu())
        return None if gathered is None else gathered.to(self._device)

    def send_forward(self, hidden: torch.Tensor) -> None:
        self._others.send_forward(hidden.cpu())

    def receive(self, num_tokens: int) -> torch.Tensor:
        return self._others.receive(num_tokens).to(self._device, copy=True)

    def close(self) -> None:
        self._others.close()


def join_gpus(
    url: str,
    shard: Shard,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    gpu_uuid: str,
) -> NcclCollectives | StagedCollectives:
    """The way to the other ranks of an instance on GPUs, by NCCL where each has a GPU of its own.

    Raises:
        CollectivesFailed: the others did not come.
    """
    try:
        at = meet_at(url, shard, timedelta(seconds=TIMEOUT_S))
        is_shared = _is_shared(at, shard, gpu_uuid)
    except (RuntimeError, OSError) as error:
        raise CollectivesFailed(f"the other ranks did not come: {error}") from error
    if is_shared:
        logger.warning("ranks of this instance share a GPU: they talk by gloo, which is slow")
        others = GlooCollectives(at, shard, hidden_size=hidden_size, dtype=dtype)
        return StagedCollectives(others, device)
    return NcclCollectives(at, shard, hidden_size=hidden_size, dtype=dtype, device=device)


def _is_shared(at: MeetingPoint, shard: Shard, gpu_uuid: str) -> bool:
    """Whether any two ranks have the same GPU; all of them find the same."""
    tp, num_workers = shard.parallelism.tp, shard.parallelism.num_workers
    at.store.set(f"gpu-{shard.stage * tp + shard.tp_rank}", gpu_uuid)
    return len({at.store.get(f"gpu-{rank}") for rank in range(num_workers)}) < num_workers
