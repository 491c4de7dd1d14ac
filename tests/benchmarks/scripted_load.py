"""An instance under a load known beforehand: its real leader and ranks, no daemon, no client.

All requests come at once; the leader is told to leave when the last one is answered. What the
ranks did is known when the instance has ended: see `Instance.steps`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import msgspec

from gpu_workers.group import GroupExchange, GroupExecutor
from gpu_workers.leader import Leader
from gpu_workers.plan_bus import LeaderBus, Waiting
from gpu_workers.prefill_side import Owner
from gpu_workers.profiling import ranks
from gpu_workers.profiling.subject import INSTANCE, LEADER, Subject
from gpu_workers.scheduler import Scheduler
from ipc.messages import Command, Event, Exit, MixedPolicy, PeerUp, Prefill, Prefilled, Tokens
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Role, SamplingParams
from tests.benchmarks.watched_rank import Step, Watched, steps_file, watched

PREFILL_TOKENS = 512
MAX_BATCH = 256


class Span(msgspec.Struct, frozen=True):
    """The part of a run that counts: see `Instance.decode` and `prefill`."""

    began_s: float
    ended_s: float


class Script:
    """In the daemon's place: tells requests, hears answers."""

    def __init__(self, prompts: Sequence[int], num_tokens: int, bus: LeaderBus | None) -> None:
        self._commands: list[Command] = [
            _request(number, length, num_tokens) for number, length in enumerate(prompts)
        ]
        self._num_left = self._num_unread = len(prompts)
        self._bus = bus
        self._waiting = Waiting(bus.waitables) if bus else None
        self.began_s = time.monotonic()
        self.all_read_s = self.first_answer_s = self.last_answer_s = 0.0

    def send(self, event: Event | Tokens) -> None:
        if isinstance(event, Prefilled):
            self._num_unread -= 1
            self.all_read_s = time.monotonic()
            self._answered(sum(reason is not None for reason in event.finished))
        elif isinstance(event, Tokens):
            self._answered(sum(row.finished is not None for row in event.rows))

    def receive(self, timeout_s: float | None) -> list[Command]:
        if self._commands:
            commands, self._commands = self._commands, []
            return commands
        if not self._num_left:
            return [Exit()]
        if self._bus is not None and self._waiting is not None:
            if timeout_s != 0:
                self._waiting(timeout_s)
            self._bus.drain()
        return []

    def _answered(self, count: int) -> None:
        if count:
            self.last_answer_s = time.monotonic()
            self.first_answer_s = self.first_answer_s or self.last_answer_s
        self._num_left -= count


class Instance:
    """Runs loads on ranks that are there; `steps` of all of them afterwards."""

    def __init__(self, subject: Subject, rank: Watched, bus: LeaderBus | None) -> None:
        self.sums_us = rank.sums_us
        self.steps: list[list[Step]] = []
        self._subject, self._rank, self._bus = subject, rank, bus
        layout = rank.exchange.layout
        self._scheduler = Scheduler(
            Owner(INSTANCE, 1),
            Role.MIXED,
            MixedPolicy(),
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            limits=BatchLimits(PREFILL_TOKENS, MAX_BATCH),
            parallelism=subject.parallelism,
        )

    def decode(self, num_requests: int, context: int, num_tokens: int, *, in_flight: int) -> Span:
        """While all requests decode, none reads its prompt and none has ended."""
        script = self._run([context] * num_requests, num_tokens, in_flight)
        return Span(script.all_read_s, script.first_answer_s)

    def prefill(self, prompts: Sequence[int], *, in_flight: int) -> Span:
        """All of it: each request ends with its first token."""
        script = self._run(prompts, 1, in_flight)
        return Span(script.began_s, script.last_answer_s)

    def _run(self, prompts: Sequence[int], num_tokens: int, in_flight: int) -> Script:
        script = Script(prompts, num_tokens, self._bus)
        if self._bus is None:
            parts = (self._rank.executor, self._rank.exchange)
            Leader(script, self._scheduler, *parts, _no_peers).run()
            return script
        parallelism = self._subject.parallelism
        group = GroupExecutor(self._rank.executor, self._bus, parallelism)
        exchange = GroupExchange(self._rank.exchange, self._bus, parallelism.num_workers)
        Leader(
            script,
            self._scheduler,
            group,
            exchange,
            _no_peers,
            max_in_flight=in_flight,
            is_done=group.is_done,
        ).run()
        return script


@contextmanager
def instance(subject: Subject) -> Iterator[Instance]:
    """An instance of that shape, its other ranks in processes of their own."""
    python = [sys.executable, "-m", "tests.benchmarks.watched_rank"]
    asked = [msgspec.json.encode(subject).decode()]
    followers = range(1, len(subject.names))
    with tempfile.TemporaryDirectory(prefix="ds-") as directory:
        commands = [[*python, str(n), *asked, directory, str(os.getpid())] for n in followers]
        with ranks.running(commands), watched(subject, LEADER, directory) as rank:
            if not commands:
                found = Instance(subject, rank, None)
                yield found
            else:
                with closing(LeaderBus(ranks.endpoint(directory), subject.names[1:])) as bus:
                    bus.gather(60.0)
                    found = Instance(subject, rank, bus)
                    yield found
                    bus.dismiss()
        found.steps = [rank.executor.steps, *(_read(directory, number) for number in followers)]


def _read(directory: str, number: int) -> list[Step]:
    return msgspec.json.decode(steps_file(directory, number).read_bytes(), type=list[Step])


def _request(number: int, num_tokens: int, num_output: int) -> Prefill:
    prompt = tuple((7 * number + 11 * i) % 256 for i in range(num_tokens))
    sampling = SamplingParams(max_tokens=num_output, seed=0, temperature=0.0)
    return Prefill(2 * number + 1, number, (2 * number,), (0,), prompt, (), sampling)


def _no_peers(peer: PeerUp) -> None:
    raise AssertionError(f"{peer.worker} is introduced by nobody")
