"""Times what this thread does, without the turns that other programs have on its core.

Linux counts how long a thread was ready to run and had to wait for a core (`run_delay`, the second
figure of /proc/thread-self/schedstat). On a core of its own that is nothing; on a shared one it is
time that the work itself does not take. Where the kernel does not count, wall time is all there is.
"""

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

LEAST_SHARE = 0.01
"""Two clocks are compared: beside a wait that was far longer than the work, what is left between
them says nothing, and would be no time at all as easily as any."""


class Stopwatch:
    """`with stopwatch:` around the work, in the thread that made it; then `ms`.

    `waited_s` and `total_s` add up over all uses: waiting for the core, and all of the time.

    Args:
        is_alone: whether our process has one busy thread. Where others of its own take turns with
            this one, as those of collectives do, waiting for them is part of the work.
        settle: waits for a device on which work is done, at both ends. Such work goes on while this
            thread waits for its core, so with a device `is_alone` is to be False.
    """

    def __init__(self, *, is_alone: bool = True, settle: Callable[[], None] = lambda: None) -> None:
        self._is_alone = is_alone
        self._settle = settle
        self.ms = 0.0
        self.waited_s = 0.0
        self.total_s = 0.0
        try:
            self._schedstat: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._schedstat = None
        self._waited_before_s = 0.0
        self._began_s = 0.0

    def close(self) -> None:
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def __enter__(self) -> Self:
        self._settle()
        self._waited_before_s = self._run_delay_s()
        self._began_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._settle()
        elapsed_s = time.perf_counter() - self._began_s
        waited_s = min(elapsed_s, self._run_delay_s() - self._waited_before_s)
        worked_s = elapsed_s - waited_s if self._is_alone else elapsed_s
        self.ms = 1000 * max(worked_s, LEAST_SHARE * elapsed_s)
        self.waited_s += waited_s
        self.total_s += elapsed_s

    def _run_delay_s(self) -> float:
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
