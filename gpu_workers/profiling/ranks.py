"""The ranks of an instance that is profiled: a process each, as in a service, but no daemon.

All of them build their engine from the same `Subject`; the leader stays in the process that
measures, the others carry out its plans. Where there are enough cores each rank has its own.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import msgspec
import torch

from gpu_workers import lifeline
from gpu_workers.collectives import Alone, Collectives, CollectivesFailed
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, build_executor, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.follower import Follower, Peers
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.group import drawer, ranks
from gpu_workers.kv_exchange import KVExchange
from gpu_workers.leader import StepExecutor
from gpu_workers.models.config import read_config
from gpu_workers.plan_bus import FollowerBus, GroupBroken, Waiting
from gpu_workers.profiling.bench import twin
from gpu_workers.profiling.rounds import Progress
from gpu_workers.shm_collectives import sums_library
from ipc.kv_layout import RankLayout
from ipc.kv_shm import PoolUnavailable
from ipc.messages import Command, Event, LoadFormat, PeerUp, Tokens
from ipc.sharding import Shard
from ipc.vocabulary import DType, Parallelism, WorkerName

logger = logging.getLogger(__name__)

INSTANCE = "profiled"
LEADER = WorkerName(INSTANCE)
EXIT_S = 10.0


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of a model, as the daemon would run it; `kv_bytes` and `num_threads` of each
    worker."""

    model_dir: str
    dtype: DType
    load_format: LoadFormat
    max_context_tokens: int
    block_size: int
    kv_bytes: int
    num_threads: int
    parallelism: Parallelism

    @property
    def names(self) -> list[WorkerName]:
        """All ranks, the leader first."""
        return ranks(INSTANCE, self.parallelism)


class Rank(NamedTuple):
    """One rank's engine."""

    executor: Executor
    exchange: CpuExchange


def shard_of(subject: Subject, name: WorkerName) -> Shard:
    """Raises ModelError where the model cannot be divided like that."""
    config = read_config(subject.model_dir)
    return config.shard(subject.parallelism, name.stage, name.tp_rank)


def layout_of(subject: Subject, name: WorkerName) -> RankLayout:
    """Raises ModelError where the shape, or the memory, is none to run the model with."""
    return pool_layout(
        read_config(subject.model_dir),
        dtype=subject.dtype,
        block_size=subject.block_size,
        kv_bytes=subject.kv_bytes,
        shard=shard_of(subject, name),
    )


def meet(subject: Subject, name: WorkerName, directory: str) -> Collectives:
    """Join the other ranks, who must do the same. Raises CollectivesFailed."""
    if subject.parallelism.num_workers == 1:
        return Alone()
    return GlooCollectives(
        f"file://{directory}/meeting",
        shard_of(subject, name),
        hidden_size=read_config(subject.model_dir).hidden_size,
        dtype=TORCH_DTYPES[subject.dtype],
        library=sums_library(),
    )


def build(
    subject: Subject,
    name: WorkerName,
    collectives: Collectives,
    progress: Progress = lambda fraction: None,
) -> Rank:
    """Raises ModelError or PoolUnavailable."""
    spec = EngineSpec(
        model_dir=subject.model_dir,
        dtype=subject.dtype,
        load_format=subject.load_format,
        max_context_tokens=subject.max_context_tokens,
        shard=shard_of(subject, name),
    )
    config, exchange = (
        read_config(subject.model_dir),
        CpuExchange(layout_of(subject, name), INSTANCE),
    )
    executor = build_executor(config, spec, exchange, collectives=collectives, progress=progress)
    return Rank(executor, exchange)


@contextmanager
def started(subject: Subject, directory: str) -> Iterator[None]:
    """Processes of all ranks but the leader; at the end they must have been dismissed."""
    python = [sys.executable, "-P", "-m", "gpu_workers", "profile-rank"]
    asked = [msgspec.json.encode(subject).decode(), directory, str(os.getpid())]
    with running([[*python, str(number), *asked] for number in range(1, len(subject.names))]):
        yield


@contextmanager
def running(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Processes that end on their own where all goes well, and are ended where it does not."""
    processes = [subprocess.Popen(command) for command in commands]
    try:
        yield
        for process in processes:
            process.wait(EXIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def placed(subject: Subject, number: int) -> Iterator[None]:
    """On the `number`-th share of the cores, if there are enough for all ranks."""
    before = os.sched_getaffinity(0)
    threads, num_workers = subject.num_threads, subject.parallelism.num_workers
    torch.set_num_threads(threads)
    if num_workers > 1 and has_cores_for(subject):
        os.sched_setaffinity(0, sorted(before)[number * threads : (number + 1) * threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def has_cores_for(subject: Subject) -> bool:
    """Whether each rank can have cores of its own."""
    needed = subject.parallelism.num_workers * subject.num_threads
    return needed <= len(os.sched_getaffinity(0))


def endpoint(directory: str) -> str:
    """Where plans are heard."""
    return f"ipc://{directory}/plans.ipc"


def main(argv: Sequence[str]) -> int:
    """`gpu_workers profile-rank NUMBER SUBJECT DIRECTORY PARENT`, started by `started` alone."""
    number, subject_json, directory, parent = argv
    lifeline.die_with_parent(int(parent))
    try:
        _serve(msgspec.json.decode(subject_json, type=Subject), int(number), directory)
    except (ModelError, PoolUnavailable, CollectivesFailed, GroupBroken) as error:
        logger.error("worker %s of the profiled instance: %s", number, error)
        return 1
    return 0


def _serve(subject: Subject, number: int, directory: str) -> None:
    name = subject.names[number]
    with (
        placed(subject, number),
        closing(meet(subject, name, directory)) as collectives,
        torch.inference_mode(),
    ):
        executor, exchange = build(subject, name, collectives)
        exchange.pool.fill_(0.5)
        with twin(exchange, subject.max_context_tokens, name):
            follow(subject, name, directory, executor, exchange)


def follow(
    subject: Subject,
    name: WorkerName,
    directory: str,
    executor: StepExecutor,
    exchange: KVExchange,
) -> None:
    """Carry out the leader's plans until it dismisses us."""
    with closing(FollowerBus(endpoint(directory), name)) as feed:
        Follower(
            Nobody(),
            feed,
            executor,
            exchange,
            Peers(exchange, _no_descriptor),
            wait=Waiting(feed.waitables),
            draws=name == drawer(INSTANCE, subject.parallelism),
        ).run()


class Nobody:
    """A follower's link where there is no daemon: nothing is ever said."""

    def send(self, event: Event | Tokens) -> None:
        raise AssertionError(f"nobody is there to hear of {event}")

    def receive(self, timeout_s: float | None) -> list[Command]:
        return []


def _no_descriptor(peer: PeerUp) -> int:
    raise AssertionError(f"{peer.worker} is introduced by nobody")
