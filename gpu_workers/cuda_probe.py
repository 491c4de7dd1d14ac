"""What a way between two places can do: its bandwidth, and which copies are quicker together.

Measured once when a peer is met, out of the peer's pool, whose bytes are only read, into memory of
our own that nobody else uses. A GPU that is full has none: then nothing is measured, and nothing
fails. Times are the device's, from before the first call to the end of the last copy, so what the
calls cost is in them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile

from gpu_workers.cuda_routes import Copy, copy_together
from ipc.cuda_runtime import CudaError, CudaRuntime

PROBE_BYTES = 32 << 20
NUM_RUNS = 32
RUN_BYTES = tuple(1 << bits for bits in (12, 14, 16, 18, 20))
NUM_ROUNDS = 2
CLEARLY = 0.9  # of the time, or it is not worth a different call


class NotMeasured(Exception):
    """There is no memory to measure with."""


@contextmanager
def scratch(runtime: CudaRuntime, num_bytes: int) -> Iterator[int]:
    """Memory of the current device to copy into. Raises NotMeasured: there is none left."""
    try:
        address = runtime.allocate(num_bytes)
    except CudaError as error:
        raise NotMeasured(str(error)) from error
    try:
        yield address
    finally:
        runtime.free(address)


class Probe:
    """Measures copies from one place to another, on one stream.

    Args:
        num_bytes: at either place.
    """

    def __init__(
        self, runtime: CudaRuntime, stream: int, *, source: int, target: int, num_bytes: int
    ) -> None:
        self._runtime, self._stream = runtime, stream
        self._source, self._target, self._num_bytes = source, target, num_bytes

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have what measuring takes."""
        runtime = self._runtime
        with ExitStack() as undo:
            self._began, self._ended = (runtime.make_event(is_timed=True) for _ in range(2))
            undo.callback(runtime.destroy_event, self._began)
            undo.callback(runtime.destroy_event, self._ended)
            undo.callback(runtime.synchronize, self._stream)
            yield

    def bandwidth(self) -> float:
        """Bytes per second of one large copy."""
        copy = (self._target, self._source, self._num_bytes)
        return self._num_bytes / self._seconds(lambda: self._runtime.copy(*copy, self._stream))

    def batch_below(self) -> int:
        """Copies of fewer bytes are quicker together."""
        if not self._runtime.has_batches:
            return 0
        sizes = [size for size in RUN_BYTES if NUM_RUNS * size <= self._num_bytes]
        return crossing(sizes, self._single_s, self._together_s)

    def _single_s(self, size: int) -> float:
        def act() -> None:
            for copy in self._scattered(size):
                self._runtime.copy(*copy, self._stream)

        return self._seconds(act)

    def _together_s(self, size: int) -> float:
        copies = self._scattered(size)
        return self._seconds(lambda: copy_together(self._runtime, copies, self._stream))

    def _scattered(self, size: int) -> list[Copy]:
        """Runs that do not follow each other."""
        places = [size * (7 * number % NUM_RUNS) for number in range(NUM_RUNS)]
        return [
            (self._target + size * number, self._source + place, size)
            for number, place in enumerate(places)
        ]

    def _seconds(self, act: Callable[[], None]) -> float:
        """The best of some rounds; the first may have to set up the way."""
        return min([self._once(act) for _ in range(1 + NUM_ROUNDS)][1:])

    def _once(self, act: Callable[[], None]) -> float:
        self._runtime.record(self._began, self._stream)
        act()
        self._runtime.record(self._ended, self._stream)
        self._runtime.await_event(self._ended)
        return max(self._runtime.seconds_between(self._began, self._ended), 1e-9)


def crossing(
    sizes: list[int], single_s: Callable[[int], float], together_s: Callable[[int], float]
) -> int:
    """The smallest of these sizes from which on copies are not clearly quicker together: 0 if they
    never are, twice the largest if they always are."""
    quicker = list(takewhile(lambda size: together_s(size) <= CLEARLY * single_s(size), sizes))
    if not quicker:
        return 0
    return sizes[len(quicker)] if len(quicker) < len(sizes) else 2 * sizes[-1]
