"""The way through the host's memory, where our GPU cannot read the peer's pool.

The owner of the pool fills slots that both have pinned, one at a time as we ask, and we empty them
onto our GPU: both ways are busy at a time. A thread of our own does that, so that the step loop
never waits for the owner. An owner that dies in the middle, or sends us away, loses the pull, which
is told; the next one knocks again. One that stands still holds up the pulls from it alone, until
who watches it has killed it.
"""

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

from gpu_workers.cuda_copies import BATCH_BELOW_BYTES, CopyPlan, Run, Staged, all_runs, staged
from gpu_workers.cuda_probe import NotMeasured, Probe, scratch
from gpu_workers.cuda_routes import Copy, PullPath, copy_all
from gpu_workers.cuda_slots import NUM_SLOTS, SLOT_BYTES, TOTAL_BYTES, SharedSlots, create
from ipc import kv_bounce
from ipc.cuda_runtime import CudaError, CudaRuntime
from ipc.kv_bounce import Line, OwnerGone, Unanswered

logger = logging.getLogger(__name__)

Tell = Callable[[float, int], None]
"""Hears the bytes per second of a way, and below how many bytes copies are made together."""


class BounceRoute:
    """Speaks with the owner of one pool.

    Args:
        device: ours.
        descriptor: the pool's; it stays the caller's.
        verifies: whether what was copied is asked for once more, and compared.

    Raises:
        PoolUnavailable: no memory for the slots.
    """

    path = PullPath.HOST
    mapping = None

    def __init__(
        self, runtime: CudaRuntime, device: int, descriptor: int, *, verifies: bool = False
    ) -> None:
        self._runtime = runtime
        memory = create("importer")
        try:
            self._slots = SharedSlots(runtime, os.dup(memory))
        except BaseException:
            os.close(memory)
            raise
        self._owner = _Owner(os.dup(descriptor), memory)
        self._verifies = verifies
        self._batch_below = BATCH_BELOW_BYTES
        self._stream = runtime.make_stream()
        self._emptied = [runtime.make_event() for _ in range(NUM_SLOTS)]
        self._next = cycle(range(NUM_SLOTS))
        self._carrier = ThreadPoolExecutor(1, "bounce", runtime.use, (device,))

    def copy(self, plan: CopyPlan, target: int, stream: int) -> Future[int]:
        return self._carrier.submit(self._pull, plan, target)

    def measure(self, num_bytes: int, tell: Tell) -> None:
        """Have it told what so many bytes show, some time soon."""
        self._carrier.submit(self._measure, num_bytes, tell)

    def finish(self) -> None:
        self._owner.leave()
        self._carrier.shutdown(cancel_futures=True)
        self._owner.close()

    def close(self) -> None:
        for event in self._emptied:
            self._runtime.destroy_event(event)
        self._runtime.destroy_stream(self._stream)
        self._slots.close()

    # ---- on the thread ----------------------------------------------------------------------

    def _pull(self, plan: CopyPlan, target: int) -> int:
        """How many parts differ from their source, where that is looked for. Raises Unanswered."""
        with self._owner as line:
            self._carry(line, plan, target)
            return self._num_different(line, plan, target) if self._verifies else 0

    def _carry(self, line: Line, plan: CopyPlan, target: int) -> None:
        """Until all of it lies at the target."""
        under_way: deque[tuple[int, list[Staged]]] = deque()
        try:
            for parts in staged(all_runs(plan), SLOT_BYTES, kv_bounce.MAX_RUNS):
                if len(under_way) == NUM_SLOTS:
                    self._empty(line, *under_way.popleft(), target)
                slot = next(self._next)
                self._runtime.await_event(self._emptied[slot])  # at once, if never recorded
                _ask(line, slot, parts)
                under_way.append((slot, parts))
            while under_way:
                self._empty(line, *under_way.popleft(), target)
        finally:
            self._runtime.synchronize(self._stream)

    def _empty(self, line: Line, slot: int, parts: list[Staged], target: int) -> None:
        _await_filled(line, slot)
        at = self._slots.at(slot)
        self._copy_all([(target + run.target, at + offset, run.num_bytes) for run, offset in parts])
        self._runtime.record(self._emptied[slot], self._stream)

    def _num_different(self, line: Line, plan: CopyPlan, target: int) -> int:
        """The source again in one slot, what we have of it in another."""
        theirs, ours = self._slots.at(0), self._slots.at(1)
        found = 0
        for parts in staged(all_runs(plan), SLOT_BYTES, kv_bounce.MAX_RUNS):
            _ask(line, 0, parts)
            _await_filled(line, 0)
            self._copy_all(
                [(ours + offset, target + run.target, run.num_bytes) for run, offset in parts]
            )
            self._runtime.synchronize(self._stream)
            found += sum(
                ctypes.string_at(theirs + offset, run.num_bytes)
                != ctypes.string_at(ours + offset, run.num_bytes)
                for run, offset in parts
            )
        return found

    def _copy_all(self, copies: list[Copy]) -> None:
        below = self._batch_below if self._slots.is_pinned else 0
        copy_all(self._runtime, copies, self._stream, batch_below=below)

    def _measure(self, num_bytes: int, tell: Tell) -> None:
        try:
            with scratch(self._runtime, num_bytes) as target:  # memory of nobody
                self._seconds(num_bytes, target)  # the way is set up by it
                seconds = self._seconds(num_bytes, target)
                self._learn(target, min(num_bytes, TOTAL_BYTES))
        except (CudaError, NotMeasured, Unanswered) as error:  # pulls fail by it, if it matters
            logger.info("pulls through the host are not measured: %s", error)
        else:
            tell(num_bytes / seconds, self._batch_below if self._slots.is_pinned else 0)

    def _seconds(self, num_bytes: int, target: int) -> float:
        began_s = time.perf_counter()
        with self._owner as line:
            self._carry(line, CopyPlan((Run(0, 0, num_bytes),), (), ()), target)
        return time.perf_counter() - began_s

    def _learn(self, target: int, num_bytes: int) -> None:
        """Which copies out of the slots are quicker together."""
        if not self._slots.is_pinned:
            return
        source = self._slots.at(0)
        probe = Probe(
            self._runtime, self._stream, source=source, target=target, num_bytes=num_bytes
        )
        with probe.running():
            self._batch_below = probe.batch_below()


class _Owner:
    """The way to the owner of a pool: a line for one pull after the other, a new one after one that
    broke.

    Args:
        door, memory: descriptors of the pool and of the slots; taken over.
    """

    def __init__(self, door: int, memory: int) -> None:
        self._door, self._memory = door, memory
        self._line: Line | None = None
        self._has_left = False
        self._lock = threading.Lock()

    def __enter__(self) -> Line:
        """Raises Unanswered: it does not listen."""
        with self._lock:
            if self._has_left:
                raise OwnerGone("we have parted from the pool's owner")
            self._line = self._line or kv_bounce.knock(self._door, self._memory)
            return self._line

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            with self._lock:
                self._hang_up()

    def leave(self) -> None:
        """End what waits for the owner, on any thread, and let nothing wait from here on."""
        with self._lock:
            self._has_left = True
            if self._line is not None:
                self._line.cut()

    def close(self) -> None:
        """After `leave`, when nobody waits any more."""
        self._hang_up()
        os.close(self._door)
        os.close(self._memory)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None


def _ask(line: Line, slot: int, parts: list[Staged]) -> None:
    line.ask(slot, [(run.source, run.num_bytes) for run, _ in parts])


def _await_filled(line: Line, slot: int) -> None:
    filled = line.await_filled()
    assert filled == slot, f"slot {filled} is full and {slot} was asked for"
