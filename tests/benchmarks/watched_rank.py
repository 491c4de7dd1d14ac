"""A rank of an instance with a watch on what it computes and what it waits for.

`python -m tests.benchmarks.watched_rank NUMBER SUBJECT DIRECTORY PARENT` is a follower; when it has
been dismissed it leaves its steps in DIRECTORY. The leader's rank is made by `watched` where the
benchmark itself runs.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from gpu_workers import lifeline
from gpu_workers.collectives import Collectives
from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.executor import Executor
from gpu_workers.models.config import read_config
from gpu_workers.profiling import ranks
from gpu_workers.profiling.places import CpuPlace
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.profiling.subject import Subject
from gpu_workers.step_plan import StepPlan, StepResult
from ipc.vocabulary import WorkerName

SUM_ROWS = (1, 8, 32, 512)
NUM_SUMS = 300


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What one rank did of a step with rows. Times are CLOCK_MONOTONIC seconds."""

    num_tokens: int
    began_s: float
    ended_s: float
    delayed_s: float  # while others had our core: programs, or threads of our own collectives
    waited_s: float  # for hidden states of the stage before
    summed_s: float  # in sums and gathers, the wait for the other ranks included

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.began_s - self.delayed_s - self.waited_s


class WatchedCollectives:
    """Passes every call on and counts its seconds."""

    on_device = None

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.tp, self.tp_rank = inner.tp, inner.tp_rank
        self.waited_s = self.summed_s = 0.0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        began_s = time.monotonic()
        total = self._inner.all_reduce(x)
        self.summed_s += time.monotonic() - began_s
        return total

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        began_s = time.monotonic()
        gathered = self._inner.gather_columns(x)
        self.summed_s += time.monotonic() - began_s
        return gathered

    def send_forward(self, hidden: torch.Tensor) -> None:
        self._inner.send_forward(hidden)

    def receive(self, num_tokens: int) -> torch.Tensor:
        began_s = time.monotonic()
        hidden = self._inner.receive(num_tokens)
        self.waited_s += time.monotonic() - began_s
        return hidden

    def close(self) -> None:
        self._inner.close()


class WatchedExecutor:
    """Notes the steps of an executor."""

    def __init__(self, executor: Executor, collectives: WatchedCollectives) -> None:
        self._executor, self._collectives = executor, collectives
        self.steps: list[Step] = []
        self._stopwatch = Stopwatch()

    def launch(self, plan: StepPlan) -> Any:
        watch, began_s = self._collectives, time.monotonic()
        watch.waited_s = watch.summed_s = 0.0
        with self._stopwatch:
            launched = self._executor.launch(plan)
        if plan.rows:
            num_tokens, ended_s = sum(row.num_new for row in plan.rows), time.monotonic()
            delayed_s = max(0.0, ended_s - began_s - self._stopwatch.ms / 1000)
            times = (began_s, ended_s, delayed_s, watch.waited_s, watch.summed_s)
            self.steps.append(Step(num_tokens, *times))
        return launched

    def collect(self, launched: Any) -> StepResult:
        return self._executor.collect(launched)


class Watched(msgspec.Struct, frozen=True):
    """One rank; `sums_us` are bare sums of SUM_ROWS rows, all ranks doing nothing else."""

    executor: WatchedExecutor
    exchange: Any
    sums_us: list[float]


@contextmanager
def watched(subject: Subject, name: WorkerName, directory: str) -> Iterator[Watched]:
    """A rank with its own cores, its weights loaded, its pool's memory there."""
    with (
        ranks.placed(subject, subject.names.index(name)),
        closing(ranks.meet(subject, name, directory, CpuPlace())) as inner,
        torch.inference_mode(),
    ):
        collectives = WatchedCollectives(inner)
        rank = ranks.build(subject, name, CpuPlace(), collectives)
        rank.exchange.pool.fill_(0.5)
        sums_us = bare_sums_us(subject, inner) if inner.tp > 1 else []
        yield Watched(WatchedExecutor(rank.executor, collectives), rank.exchange, sums_us)


def bare_sums_us(subject: Subject, collectives: Collectives) -> list[float]:
    width = read_config(subject.model_dir).hidden_size
    dtype = TORCH_DTYPES[subject.dtype]
    return [_sum_us(collectives, torch.ones((rows, width), dtype=dtype)) for rows in SUM_ROWS]


def _sum_us(collectives: Collectives, x: torch.Tensor) -> float:
    times = []
    for _ in range(NUM_SUMS):
        began_s = time.perf_counter()
        collectives.all_reduce(x)
        times.append(1e6 * (time.perf_counter() - began_s))
    return statistics.median(times)


def steps_file(directory: str, number: int) -> Path:
    return Path(directory) / f"steps-{number}.json"


def main(number: str, subject_json: str, directory: str, parent: str) -> None:
    lifeline.die_with_parent(int(parent))
    subject = msgspec.json.decode(subject_json, type=Subject)
    name = subject.names[int(number)]
    with watched(subject, name, directory) as rank:
        ranks.follow(subject, name, directory, rank.executor, rank.exchange)
        steps_file(directory, int(number)).write_bytes(msgspec.json.encode(rank.executor.steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
