"""The way through the host's memory, where our GPU cannot read the peer's pool.

The owner of the pool fills slots that both have pinned, one at a time as we ask, and we empty them
onto our GPU: both ways are busy at a time. A thread of our own does that, so that the step loop
never waits for the owner. An owner that dies in the middle loses the pull, which is told; one that
stands still holds up the pulls from it alone, until who watches it has killed it.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

from gpu_workers.cuda_copies import CopyPlan, Run, Staged, all_runs, staged
from gpu_workers.cuda_routes import PullPath, copy_all
from gpu_workers.cuda_slots import NUM_SLOTS, SLOT_BYTES, SharedSlots, create
from ipc import kv_bounce
from ipc.cuda_runtime import CudaError, CudaRuntime
from ipc.kv_bounce import OwnerGone
from ipc.kv_shm import PoolUnavailable

logger = logging.getLogger(__name__)


class BounceRoute:
    """Speaks with the owner of one pool.

    Args:
        device: ours.
        descriptor: the pool's; it stays the caller's.

    Raises:
        OwnerGone: it has ended.
        PoolUnavailable: no memory for the slots, or the owner cannot be asked.
    """

    path = PullPath.HOST
    mapping = None

    def __init__(self, runtime: CudaRuntime, device: int, descriptor: int) -> None:
        self._runtime = runtime
        memory = create("importer")
        try:
            self._slots = SharedSlots(runtime, os.dup(memory))
            self._line = self._knock(descriptor, memory)
        finally:
            os.close(memory)
        self._stream = runtime.make_stream()
        self._emptied = [runtime.make_event() for _ in range(NUM_SLOTS)]
        self._next = cycle(range(NUM_SLOTS))
        self._carrier = ThreadPoolExecutor(1, "bounce", runtime.use, (device,))

    def copy(self, plan: CopyPlan, target: int, stream: int) -> Future[None]:
        return self._carrier.submit(self._carry, plan, target)

    def measure(self, num_bytes: int, tell: Callable[[float], None]) -> None:
        """Have `tell` called with the bytes per second of so many, some time soon."""
        self._carrier.submit(self._measure, num_bytes, tell)

    def finish(self) -> None:
        self._line.cut()
        self._carrier.shutdown(cancel_futures=True)

    def close(self) -> None:
        for event in self._emptied:
            self._runtime.destroy_event(event)
        self._runtime.destroy_stream(self._stream)
        self._slots.close()
        self._line.close()

    def _knock(self, descriptor: int, memory: int) -> kv_bounce.Line:
        try:
            return kv_bounce.knock(descriptor, memory)
        except (OwnerGone, PoolUnavailable):
            self._slots.close()
            raise

    def _carry(self, plan: CopyPlan, target: int) -> None:
        """Until all of it lies in our pool. Raises OwnerGone."""
        under_way: deque[tuple[int, list[Staged]]] = deque()
        try:
            for parts in staged(all_runs(plan), SLOT_BYTES, kv_bounce.MAX_RUNS):
                if len(under_way) == NUM_SLOTS:
                    self._empty(*under_way.popleft(), target)
                slot = next(self._next)
                self._runtime.await_event(self._emptied[slot])  # at once, if never recorded
                self._line.ask(slot, [(run.source, run.num_bytes) for run, _ in parts])
                under_way.append((slot, parts))
            while under_way:
                self._empty(*under_way.popleft(), target)
        finally:
            self._runtime.synchronize(self._stream)

    def _empty(self, slot: int, parts: list[Staged], target: int) -> None:
        filled = self._line.await_filled()
        assert filled == slot, f"slot {filled} is full and {slot} was asked for"
        at = self._slots.at(slot)
        copies = [(target + run.target, at + offset, run.num_bytes) for run, offset in parts]
        copy_all(self._runtime, copies, self._stream, batch_below=self._slots.batch_below)
        self._runtime.record(self._emptied[slot], self._stream)

    def _measure(self, num_bytes: int, tell: Callable[[float], None]) -> None:
        try:
            seconds = self._seconds(num_bytes)
        except (CudaError, OwnerGone) as error:  # which the next pull fails by, if it matters
            logger.info("pulls through the host are not measured: %s", error)
        else:
            tell(num_bytes / seconds)

    def _seconds(self, num_bytes: int) -> float:
        """That so many bytes take, into memory of nobody."""
        scratch = self._runtime.allocate(num_bytes)
        try:
            began_s = time.perf_counter()
            self._carry(CopyPlan((Run(0, 0, num_bytes),), (), ()), scratch)
            return time.perf_counter() - began_s
        finally:
            self._runtime.free(scratch)


class LostRoute:
    """From a pool whose owner ended before we could open it: every pull is lost at once.

    Others of our instance may have opened it in time, and pull as their leader says.
    """

    path = PullPath.HOST
    mapping = None

    def copy(self, plan: CopyPlan, target: int, stream: int) -> Future[None]:
        lost: Future[None] = Future()
        lost.set_exception(OwnerGone("the pool's owner has ended"))
        return lost

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
