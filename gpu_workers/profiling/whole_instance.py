"""An instance of several ranks behind the face of one executor, to be measured like one.

Steps are whole steps: launched at the leader, and ended when the drawing rank's word has come
back. A plan that enters sequences has ended when every rank has carried it out, so that no part of
that runs on into the step that is timed after it.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import torch

from gpu_workers.group import GroupExchange, GroupExecutor
from gpu_workers.models.layers import Model
from gpu_workers.plan_bus import LeaderBus
from gpu_workers.profiling import ranks
from gpu_workers.profiling.bench import GREEDY, Engine
from gpu_workers.profiling.places import Machine, ThisMachine, check_gpus
from gpu_workers.profiling.ranks import Rank
from gpu_workers.profiling.rounds import Progress
from gpu_workers.profiling.subject import LEADER, Subject
from gpu_workers.step_plan import NewBlocks, NewSequence, PullResult, Row, StepPlan, StepResult
from ipc.vocabulary import Parallelism

GATHER_TIMEOUT_S = 60.0
FENCE = 1 << 40  # a sequence of our own


@contextmanager
def instance(
    subject: Subject,
    progress: Progress = lambda fraction: None,
    machine: Machine | None = None,
) -> Iterator[tuple[Engine, Rank]]:
    """What is to be measured, and the leader's rank; the others run beside it until the end.

    Raises:
        ModelError: the model cannot be run like that; nothing was started then.
        CollectivesFailed, GroupBroken: a rank was lost.
    """
    machine = machine or ThisMachine()
    shard = ranks.shard_of(subject, LEADER)
    check_gpus(subject, machine.num_gpus)
    place = machine.place(subject, 0)
    place.layout(subject, shard)  # what has no room is refused before anything is started
    with (
        tempfile.TemporaryDirectory(prefix="ds-") as directory,
        ranks.started(subject, directory, machine),
        ranks.placed(subject, 0),
        closing(ranks.meet(subject, LEADER, directory, place)) as collectives,
    ):
        rank = ranks.build(subject, LEADER, place, collectives, progress)
        if subject.parallelism.num_workers == 1:
            yield rank.executor, rank
            return
        with closing(LeaderBus(ranks.endpoint(directory), subject.names[1:])) as bus:
            bus.gather(GATHER_TIMEOUT_S)
            yield WholeInstance(rank, bus, subject.parallelism), rank
            bus.dismiss()


class WholeInstance:
    """Numbers plans anew, so that whoever measures need not count."""

    def __init__(self, leader: Rank, bus: LeaderBus, parallelism: Parallelism) -> None:
        executor = leader.executor
        self.exchange = WholePool(leader, bus, parallelism)
        self.model: Model = executor.model
        self.num_token_ids = executor.num_token_ids
        self.max_context_tokens = executor.max_context_tokens
        self.kernels_name = executor.kernels_name
        self.max_in_flight = executor.max_in_flight
        self._group = GroupExecutor(executor, bus, parallelism)
        self._num_plans = 0
        self._has_fence = False

    def launch(self, plan: StepPlan) -> tuple[StepPlan, Any]:
        self._num_plans += 1
        plan = msgspec.structs.replace(plan, step_id=self._num_plans)
        return plan, self._group.launch(plan)

    def collect(self, launched: Any) -> StepResult:
        plan, steps = launched
        result = self._group.collect(steps)
        if plan.added and not plan.rows:
            self._pass_through()
        return result

    def _pass_through(self) -> None:
        """A step of one token: its result has been through every rank, behind all plans before."""
        fence = NewSequence(FENCE, (0,), (0,), (), 0, GREEDY)
        plan = StepPlan(
            step_id=0,
            removed=(FENCE,) if self._has_fence else (),
            added=(fence,),
            blocks=(NewBlocks(FENCE, (0,)),),  # somebody's, perhaps: what they hold is no matter
            rows=(Row(FENCE, 1, True),),
        )
        self._has_fence = True
        self.collect(self.launch(plan))


class WholePool:
    """The leader's pool, and the pulls of all ranks."""

    def __init__(self, leader: Rank, bus: LeaderBus, parallelism: Parallelism) -> None:
        self._leader, self._bus = leader, bus
        self._pulls = GroupExchange(leader.exchange, bus, parallelism.num_workers)

    @property
    def pool(self) -> torch.Tensor:
        return self._leader.exchange.pool

    def finished(self) -> list[PullResult]:
        self._bus.drain()
        return self._pulls.finished()
