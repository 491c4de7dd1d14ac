"""How bytes of one peer's pool reach ours: what every way can do, and the direct one.

Where our own GPU reads the pool, within itself or by peer access, reading is one-sided: the
owner of the pool has no part in it, and copies are done in the order of a stream.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from gpu_workers.cuda_copies import CopyPlan, Run
from ipc.cuda_runtime import CudaRuntime
from ipc.kv_cuda import DeviceMemory, Mapping

Copy = tuple[int, int, int]
"""(target, source, bytes)"""


class PullPath(StrEnum):
    """What bytes pass on their way, the quickest first."""

    LOCAL = "local"
    PEER = "peer"
    HOST = "host"


class Gpu(msgspec.Struct, frozen=True):
    """One worker's device, and the others that its process sees: their UUIDs by index."""

    index: int
    uuids: tuple[str, ...]

    @property
    def uuid(self) -> str:
        return self.uuids[self.index]


class Here(NamedTuple):
    """Our end of all ways: what this process has of GPUs' memory, which GPU is ours, our pool there
    and the stream on which it is written to."""

    memory: DeviceMemory
    gpu: Gpu
    pool: Mapping
    stream: int


class Route(Protocol):
    """The way from one peer's pool."""

    @property
    def path(self) -> PullPath: ...

    @property
    def mapping(self) -> Mapping | None:
        """Where we see the pool ourselves, if we do."""
        ...

    def copy(self, plan: CopyPlan, target: int, stream: int) -> "Future[int] | None":
        """Ask for a plan's copies, from the peer's pool to the one at `target`; does not wait.

        They are done when the stream has come to their end, or where something is returned, when
        that is done: it says how many differ from their source, where that is looked for, and
        raises Unanswered if the peer did not do its part.
        """
        ...

    def finish(self) -> None:
        """No copy is under way any more when this returns, but on the stream: those that cannot
        end are lost."""
        ...

    def close(self) -> None:
        """After `finish`, and when the stream has come to the end of our copies."""
        ...


class DirectRoute:
    """The pool is mapped where our own GPU reads it."""

    def __init__(self, memory: DeviceMemory, mapping: Mapping, path: PullPath) -> None:
        self.path = path
        self.mapping = mapping
        self._memory = memory
        self._runtime: CudaRuntime = memory.runtime

    def copy(self, plan: CopyPlan, target: int, stream: int) -> None:
        runtime, source = self._runtime, self.mapping.address
        for run in plan.runs:
            runtime.copy(target + run.target, source + run.source, run.num_bytes, stream)
        copy_together(runtime, _placed(plan.batch, target, source), stream)
        for rows in plan.rows:
            runtime.copy_rows(
                (target + rows.target, rows.target_pitch),
                (source + rows.source, rows.source_pitch),
                (rows.width, rows.height),
                stream,
            )

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._memory.close(self.mapping)


def copy_together(runtime: CudaRuntime, copies: Sequence[Copy], stream: int) -> None:
    """By one call where there is one; that costs less than a call for each if they are small.

    A kernel that gathers would be quicker still for runs below some 28 KiB out of the host's
    memory (vllm-project/vllm#42212, H100), but it waits for room on a GPU that is busy with
    prefill (1.6 ms each in LMCache/LMCache#5067), where copy engines do not. The smallest runs
    here are a rank's heads of a whole block over all of its layers, seldom that small: so there is
    no kernel. Runtimes without the call (before 13: it has other arguments) copy one by one.
    """
    if len(copies) > 1 and runtime.has_batches:
        runtime.copy_batch(copies, stream)
        return
    for copy in copies:
        runtime.copy(*copy, stream)


def copy_all(
    runtime: CudaRuntime, copies: Sequence[Copy], stream: int, *, batch_below: int
) -> None:
    """Those of fewer bytes together, the others one by one."""
    copy_together(runtime, [copy for copy in copies if copy[2] < batch_below], stream)
    for copy in copies:
        if copy[2] >= batch_below:
            runtime.copy(*copy, stream)


def _placed(runs: Sequence[Run], target: int, source: int) -> list[Copy]:
    return [(target + run.target, source + run.source, run.num_bytes) for run in runs]
