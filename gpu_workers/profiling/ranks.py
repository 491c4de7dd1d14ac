"""The ranks of an instance that is profiled: a process each, as in a service, but no daemon.

All of them build their engine from the same `Subject`; the leader stays in the process that
measures, the others carry out its plans. Where there are enough cores each rank on CPU has its own.
"""

import gc
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import msgspec
import torch

from gpu_workers import lifeline
from gpu_workers.collectives import Alone, Collectives, CollectivesFailed
from gpu_workers.device_watch import DeviceWatch
from gpu_workers.engine import EngineSpec
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.follower import Follower, Peers
from gpu_workers.group import drawer
from gpu_workers.kv_exchange import KVExchange, OwnExchange
from gpu_workers.leader import StepExecutor
from gpu_workers.models.config import read_config
from gpu_workers.plan_bus import FollowerBus, GroupBroken, Waiting
from gpu_workers.profiling.places import Machine, Place, ThisMachine
from gpu_workers.profiling.rounds import Progress
from gpu_workers.profiling.subject import INSTANCE, Subject
from ipc.channel import ChannelClosed
from ipc.cuda_runtime import CudaError, CudaUnavailable
from ipc.kv_shm import PoolUnavailable
from ipc.messages import Command, Event, PeerUp, Tokens
from ipc.sharding import Shard
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)

EXIT_S = 10.0

FAULTS = (
    ModelError,
    PoolUnavailable,
    CollectivesFailed,
    GroupBroken,
    ChannelClosed,
    CudaUnavailable,
    CudaError,
    torch.AcceleratorError,
    torch.OutOfMemoryError,
)
"""What may come between us and a table, and says in one sentence what it is."""


class Rank(NamedTuple):
    """One rank's engine, where it is, and how many blocks of its pool sequences may have."""

    executor: Executor
    exchange: OwnExchange
    place: Place
    num_blocks: int


def shard_of(subject: Subject, name: WorkerName) -> Shard:
    """Raises ModelError where the model cannot be divided like that."""
    config = read_config(subject.model_dir)
    return config.shard(subject.parallelism, name.stage, name.tp_rank)


def meet(subject: Subject, name: WorkerName, directory: str, place: Place) -> Collectives:
    """Join the other ranks, who must do the same. Raises CollectivesFailed."""
    if subject.parallelism.num_workers == 1:
        return Alone()
    return place.meet(subject, shard_of(subject, name), f"file://{directory}/meeting")


def build(
    subject: Subject,
    name: WorkerName,
    place: Place,
    collectives: Collectives,
    progress: Progress = lambda fraction: None,
) -> Rank:
    """Raises ModelError or PoolUnavailable."""
    shard = shard_of(subject, name)
    spec = EngineSpec(
        model_dir=subject.model_dir,
        dtype=subject.dtype,
        load_format=subject.load_format,
        max_context_tokens=subject.max_context_tokens,
        shard=shard,
    )
    layout = place.layout(subject, shard)
    num_blocks = layout.num_blocks - place.num_spare_blocks
    if num_blocks < 1:
        raise ModelError("the KV pool has no block for a sequence")
    exchange = place.exchange(layout)
    executor = place.executor(spec, exchange, collectives, progress)
    return Rank(executor, exchange, place, num_blocks)


@contextmanager
def started(subject: Subject, directory: str, machine: Machine) -> Iterator[None]:
    """Processes of all ranks but the leader; at the end they must have been dismissed."""
    asked = [msgspec.json.encode(subject).decode(), directory, str(os.getpid())]
    numbers = range(1, len(subject.names))
    with running([[*machine.rank_command, str(number), *asked] for number in numbers]):
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
    """On the `number`-th share of the cores, if it computes there and there are enough for all."""
    before = os.sched_getaffinity(0)
    threads, num_workers = subject.num_threads, subject.parallelism.num_workers
    torch.set_num_threads(threads)
    if subject.first_gpu is None and num_workers > 1 and has_cores_for(subject):
        os.sched_setaffinity(0, sorted(before)[number * threads : (number + 1) * threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def has_cores_for(subject: Subject) -> bool:
    """Whether each rank can have cores of its own."""
    needed = subject.parallelism.num_workers * subject.num_threads
    return needed <= len(os.sched_getaffinity(0))


@contextmanager
def without_collector() -> Iterator[None]:
    """No pauses by Python's garbage collector, as in a worker's step loop."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def endpoint(directory: str) -> str:
    """Where plans are heard."""
    return f"ipc://{directory}/plans.ipc"


def main(argv: Sequence[str], machine: Machine | None = None) -> int:
    """`gpu_workers profile-rank NUMBER SUBJECT DIRECTORY PARENT`, started by `started` alone."""
    number, subject_json, directory, parent = argv
    lifeline.die_with_parent(int(parent))
    subject = msgspec.json.decode(subject_json, type=Subject)
    try:
        _serve(subject, int(number), directory, machine or ThisMachine())
    except FAULTS as error:
        logger.error("worker %s of the profiled instance: %s", number, error)
        return 1
    return 0


def _serve(subject: Subject, number: int, directory: str, machine: Machine) -> None:
    name, place = subject.names[number], machine.place(subject, number)
    with (
        placed(subject, number),
        closing(meet(subject, name, directory, place)) as collectives,
        torch.inference_mode(),
    ):
        rank = build(subject, name, place, collectives)
        rank.exchange.pool.fill_(0.5)
        with place.twin(rank.exchange, subject.max_context_tokens, name):
            follow(subject, name, directory, rank.executor, rank.exchange)


def follow(
    subject: Subject,
    name: WorkerName,
    directory: str,
    executor: StepExecutor,
    exchange: KVExchange,
) -> None:
    """Carry out the leader's plans until it dismisses us."""
    draws = name == drawer(INSTANCE, subject.parallelism)
    with (
        without_collector(),
        closing(FollowerBus(endpoint(directory), name)) as feed,
        _watching(executor, needed=draws and subject.first_gpu is not None) as device,
    ):
        Follower(
            Nobody(),
            feed,
            executor,
            exchange,
            Peers(exchange, _no_descriptor),
            wait=Waiting([*feed.waitables, *([device.waitable] if device else [])]),
            draws=draws,
            device=device,
        ).run()


@contextmanager
def _watching(executor: StepExecutor, *, needed: bool) -> Iterator[DeviceWatch | None]:
    """What tells a rank that draws on a GPU of the end of its steps."""
    if not needed:
        yield None
        return
    assert isinstance(executor, Executor)
    with closing(DeviceWatch(executor.mark)) as device:
        yield device


class Nobody:
    """A follower's link where there is no daemon: nothing is ever said."""

    def send(self, event: Event | Tokens) -> None:
        raise AssertionError(f"nobody is there to hear of {event}")

    def receive(self, timeout_s: float | None) -> list[Command]:
        return []


def _no_descriptor(peer: PeerUp) -> int:
    raise AssertionError(f"{peer.worker} is introduced by nobody")
