"""The stopwatch leaves other programs' turns out, and nothing else."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpu_workers.profiling.stopwatch import Stopwatch

SPIN = "while True: pass"


@pytest.fixture
def stopwatch() -> Iterator[Stopwatch]:
    stopwatch = Stopwatch()
    yield stopwatch
    stopwatch.close()


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """This thread shares one core with a program that never rests."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with subprocess.Popen([sys.executable, "-c", SPIN]) as other:
        yield
        other.kill()
    os.sched_setaffinity(0, cores)


def work(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count"
)
def test_the_turns_of_others_on_the_core_are_left_out(
    stopwatch: Stopwatch, crowded_core: None
) -> None:
    work(0.1)  # the other program has started by now
    with stopwatch:
        work(0.2)
    assert stopwatch.total_s > 0.28
    assert stopwatch.ms == pytest.approx(200, rel=0.1)
    assert stopwatch.waited_s == pytest.approx(stopwatch.total_s - stopwatch.ms / 1000)


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count"
)
def test_the_turns_of_others_count_where_they_are_part_of_the_work(crowded_core: None) -> None:
    work(0.1)
    with closing(Stopwatch(is_alone=False)) as stopwatch:
        with stopwatch:
            work(0.2)
        assert stopwatch.ms == pytest.approx(1000 * stopwatch.total_s)
        assert stopwatch.waited_s > 0.05


def test_time_spent_waiting_for_anything_else_counts(stopwatch: Stopwatch) -> None:
    with stopwatch:
        time.sleep(0.05)
    assert stopwatch.ms >= 45


class AllWaiting(Stopwatch):
    """On a core that others have all the time, as the kernel's clock has it."""

    def _run_delay_s(self) -> float:
        return 2 * time.perf_counter()


def test_work_never_takes_no_time_at_all() -> None:
    """A step of no time had no throughput, and the profile of a tiny model on a crowded core
    ended by a division by it."""
    with closing(AllWaiting()) as stopwatch:
        with stopwatch:
            work(0.001)
        assert stopwatch.ms > 0
