"""Runs a search's tasks on all cores, and remembers every answer.

Tasks are handed out in waves that do not depend on how many processes there are, so neither does
the result. One process runs everything itself. Workers leave Ctrl-C to the search, which ends
them; nothing is left running.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

from planner.goodput import Goodput
from planner.intervals import Interval
from planner.placement.choices import Problem
from planner.placement.laboratory import (
    Answer,
    CheckRate,
    Compare,
    FindGoodput,
    Laboratory,
    Task,
)
from planner.placement.options import Options
from planner.verdict import RatePoint

Watch = Callable[[str, int, int], None]
"""Told what is being done, how many of its steps are done, and how many there are."""

_laboratory: Laboratory | None = None  # of a worker process


class Crew:
    """A context manager; leaving it ends the workers."""

    def __init__(self, problem: Problem, options: Options, watch: Watch | None = None) -> None:
        self.num_simulations = 0
        self.laboratory = Laboratory(problem, options)
        self._given = (problem, options)
        self._watch = watch
        self._answers: dict[Task, Answer] = {}
        self._size = options.num_processes or _num_cores()
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()  # children that are not ours

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if error is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    @property
    def num_processes(self) -> int:
        return self._size

    def goodputs(self, tasks: Sequence[FindGoodput], what: str) -> list[Goodput]:
        """In the order of the tasks."""
        return [found for found in self._run(tasks, what) if isinstance(found, Goodput)]

    def checks(self, tasks: Sequence[CheckRate], what: str) -> list[RatePoint]:
        return [found for found in self._run(tasks, what) if isinstance(found, RatePoint)]

    def comparisons(self, tasks: Sequence[Compare], what: str) -> list[Interval]:
        return [found for found in self._run(tasks, what) if isinstance(found, Interval)]

    def _run(self, tasks: Sequence[Task], what: str) -> list[Answer]:
        fresh = [task for task in dict.fromkeys(tasks) if task not in self._answers]
        for num_done, (task, answer) in enumerate(self._fresh(fresh), 1):
            self._answers[task] = answer
            self.num_simulations += _num_runs(answer)
            if self._watch is not None:
                self._watch(what, num_done, len(fresh))
        return [self._answers[task] for task in tasks]

    def _fresh(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Answer]]:
        if self._size == 1 or (len(tasks) == 1 and self._pool is None):
            for task in tasks:
                yield task, self.laboratory.run(task)
            return
        pool = self._workers()
        with _interrupts_held():
            futures: list[Future[Answer]] = [pool.submit(_run_one, task) for task in tasks]
        for task, future in zip(tasks, futures, strict=True):
            yield task, future.result()

    def _workers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._others = set(multiprocessing.active_children())
            self._pool = ProcessPoolExecutor(
                self._size,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=self._given,
            )
        return self._pool


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits. Processes that are started meanwhile inherit that, so they never hear it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_runs(answer: Answer) -> int:
    match answer:
        case Goodput() | RatePoint():
            return answer.num_runs
        case Interval():
            return 2


def _begin(problem: Problem, options: Options) -> None:
    global _laboratory
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _laboratory = Laboratory(problem, options)


def _run_one(task: Task) -> Answer:
    assert _laboratory is not None, "a worker begins with its laboratory"
    return _laboratory.run(task)
