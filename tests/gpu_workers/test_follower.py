"""What a follower does by itself: next to nothing, and when it ends."""

import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_workers import follower as follower_module
from gpu_workers.collectives import CollectivesFailed
from gpu_workers.follower import Follower, Peers, StepWatch
from gpu_workers.plan_bus import GroupBroken
from gpu_workers.step_plan import (
    NewBlocks,
    NewSequence,
    Pull,
    PullResult,
    Row,
    StepPlan,
    StepResult,
)
from ipc.kv_layout import LayoutMismatch, RankLayout, Span
from ipc.messages import Alive, Audit, Command, Exit, PeerDown, PeerUp, Released
from ipc.vocabulary import DType, KVHandle, SamplingParams, WorkerName
from tests.gpu_workers.rig import BLOCK_SIZE
from tests.gpu_workers.scripted_engine import ScriptedExchange, ScriptedExecutor

LAYOUT = RankLayout(Span(0, 1), Span(0, 1), 8, BLOCK_SIZE, 8, DType.FP32)
PEER_UP = PeerUp(WorkerName("there"), 5, LAYOUT)
PULL = Pull(KVHandle("there", 5, 2, (0, 1), 8), (3, 4))


class ScriptedFeed:
    """Gives one batch of plans at each look; dismisses when they are out, or never."""

    def __init__(self, *batches: Sequence[StepPlan], dismisses: bool = True) -> None:
        self._batches = deque(batches)
        self._dismisses = dismisses
        self.reports: list[StepResult | PullResult] = []

    @property
    def is_dismissed(self) -> bool:
        return self._dismisses and not self._batches

    def receive(self) -> list[StepPlan]:
        return list(self._batches.popleft()) if self._batches else []

    def report(self, result: StepResult | PullResult) -> None:
        self.reports.append(result)


class ScriptedLink:
    """One batch of commands at each look."""

    def __init__(self, *batches: Sequence[Command]) -> None:
        self._batches = deque(batches)
        self.answers: list[int] = []
        self.released: list[tuple[str, int]] = []

    def send(self, event: object) -> None:
        assert isinstance(event, Alive | Released), "a follower tells the daemon nothing else"
        if isinstance(event, Alive):
            self.answers.append(event.beat)
        else:
            self.released.append((event.instance, event.epoch))

    def receive(self, timeout_s: float | None) -> list[Command]:
        return list(self._batches.popleft()) if self._batches else []


class MappingExchange(ScriptedExchange):
    """Learns of peers as a real one does, and wants their block size to be ours."""

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        os.close(descriptor)
        if layout.block_size != BLOCK_SIZE:
            raise LayoutMismatch("block_size differs")
        self.known.add((worker.instance, epoch))


class Bench:
    """A follower and all that it is given."""

    def __init__(
        self,
        *plans: StepPlan,
        commands: Sequence[Sequence[Command]] = (),
        draws: bool = False,
        exchange: Any = None,
        together: bool = False,
        device: StepWatch | None = None,
    ) -> None:
        """Plans come one at a time, or all `together`."""
        self.exchange: Any = exchange or MappingExchange()
        self.executor: Any = ScriptedExecutor(self.exchange, BLOCK_SIZE, draws=draws)
        self.feed = ScriptedFeed(*([plans] if together else [[plan] for plan in plans]))
        self.waits: list[float | None] = []
        self.link = ScriptedLink(*commands)
        self.follower = Follower(
            self.link,
            self.feed,
            self.executor,
            self.exchange,
            Peers(self.exchange, lambda peer: os.open(os.devnull, os.O_RDONLY)),
            wait=self.waits.append,
            draws=draws,
            device=device,
        )


def prompt_plan(step_id: int = 1, sequence: int = 1) -> StepPlan:
    sampling = SamplingParams(max_tokens=4, seed=0)
    return StepPlan(
        step_id=step_id,
        added=(NewSequence(sequence, (0,), (5, 6, 7), (), 0, sampling),),
        blocks=(NewBlocks(sequence, (sequence,)),),
        rows=(Row(sequence, 3, True),),
    )


def test_it_waits_without_end_for_whatever_comes() -> None:
    bench = Bench(prompt_plan(), StepPlan(step_id=2, removed=(1,)))
    bench.follower.run()
    assert bench.waits == [None, None]
    assert bench.executor.table == {}


@pytest.mark.parametrize("draws", [True, False])
def test_only_the_drawing_rank_reports_steps_and_only_those_with_rows(draws: bool) -> None:
    bench = Bench(prompt_plan(), StepPlan(step_id=2, removed=(1,)), draws=draws)
    bench.follower.run()
    assert [r.step_id for r in bench.feed.reports if isinstance(r, StepResult)] == [1] * draws


class BusyDevice:
    """Comes to the first mark only when there are so many."""

    def __init__(self, num_marks: int) -> None:
        self.num_marks = num_marks
        self.marks: list[bool] = []  # whether each was told of

    def mark(self) -> None:
        self.marks.append(False)

    def passed(self) -> int:
        if len(self.marks) < self.num_marks:
            return 0
        told, self.marks = self.marks.count(False), [True] * len(self.marks)
        return told


def test_a_step_that_the_device_is_at_keeps_none_from_being_launched_and_is_reported_later() -> (
    None
):
    plans = [prompt_plan(1, 1), StepPlan(step_id=2, removed=(1,)), prompt_plan(3, 2)]
    bench = Bench(*plans, draws=True, device=BusyDevice(2))
    collect, launched_before = bench.executor.collect, list[int]()

    def note(launched: StepResult) -> StepResult:
        launched_before.append(len(bench.executor.plans))
        return collect(launched)

    bench.executor.collect = note
    bench.follower.run()
    assert [r.step_id for r in bench.feed.reports if isinstance(r, StepResult)] == [1, 3]
    assert launched_before == [3, 3]


def test_a_plan_may_come_before_the_peer_it_pulls_from_is_introduced() -> None:
    bench = Bench(StepPlan(step_id=1, pulls=(PULL,)), commands=[[], [], [PEER_UP]])
    bench.follower.run()
    assert bench.feed.reports == [PullResult(2, 1024, 1.0, 2.0)]


def test_a_peer_that_is_never_introduced_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "INTRODUCTION_TIMEOUT_S", 0.01)
    bench = Bench(StepPlan(step_id=1, pulls=(PULL,)))
    with pytest.raises(GroupBroken, match="step 1 pulls from there, who was not introduced"):
        bench.follower.run()


def test_a_peer_is_forgotten_when_a_plan_says_so_and_not_before() -> None:
    bench = Bench(
        StepPlan(step_id=1),
        StepPlan(step_id=2, pulls=(PULL,)),
        StepPlan(step_id=3, unmapped=(("there", 5),)),
        commands=[[PEER_UP, PeerDown("there", 5)]],
    )
    bench.follower.run()
    assert len(bench.exchange.pulls) == 1
    assert bench.exchange.known == set()


def test_an_introduction_that_comes_after_the_end_of_the_peer_is_dropped() -> None:
    bench = Bench(
        StepPlan(step_id=1, unmapped=(("there", 5),)),
        StepPlan(step_id=2),
        commands=[[], [PEER_UP, PeerUp(WorkerName("there"), 6, LAYOUT)]],
    )
    bench.follower.run()
    assert bench.exchange.known == {("there", 6)}


def test_peers_that_have_ended_are_forgotten_with_their_successors() -> None:
    """An instance that dies again and again once was remembered by all its epochs."""
    introduced: list[int] = []
    exchange = MappingExchange()
    peers = Peers(exchange, lambda peer: os.open(os.devnull, os.O_RDONLY))
    for epoch in range(100):
        peers.introduce(PeerUp(WorkerName("there"), epoch, LAYOUT))
        introduced += [epoch] if exchange.knows("there", epoch) else []
        peers.end("there", epoch)
        peers.introduce(PeerUp(WorkerName("there", 0, 1), epoch, LAYOUT))  # its other rank
    assert introduced == list(range(100))
    assert exchange.known == {("there", epoch) for epoch in range(100)}, "plans unmap them"
    assert sum(map(len, peers._ended.values())) == 1


def test_of_peers_that_ended_before_they_were_introduced_none_is_mapped() -> None:
    exchange = MappingExchange()
    peers = Peers(exchange, lambda peer: os.open(os.devnull, os.O_RDONLY))
    for epoch in (5, 3, 4):  # numbers say nothing of their order
        peers.end("there", epoch)
    for epoch in (5, 3, 4, 9):
        for tp_rank in (0, 1):
            peers.introduce(PeerUp(WorkerName("there", 0, tp_rank), epoch, LAYOUT))
    assert exchange.known == {("there", 9)}


def test_a_peer_whose_blocks_do_not_fit_is_no_reason_to_end() -> None:
    layout = RankLayout(Span(0, 1), Span(0, 1), 8, 2 * BLOCK_SIZE, 8, DType.FP32)
    other = PeerUp(WorkerName("there"), 5, layout)
    bench = Bench(prompt_plan(), commands=[[other]])
    bench.follower.run()
    assert bench.exchange.known == set()
    assert len(bench.executor.plans) == 1


def test_an_exit_waits_for_the_leaders_last_plans_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(StepPlan(step_id=1), prompt_plan(2), commands=[[Exit()]])
    bench.follower.run()
    assert len(bench.executor.plans) == 2
    monkeypatch.setattr(follower_module, "DISMISSAL_TIMEOUT_S", 0.01)
    bench = Bench(commands=[[Exit()]])
    bench.feed._dismisses = False
    bench.follower.run()
    assert bench.waits[-1] is not None


class LateExchange(MappingExchange):
    """A copy that goes on after `begin`, as a device's does."""

    looks = 0

    def finished(self) -> list[PullResult]:
        self.looks += bool(self.pulls)
        return super().finished() if self.looks > 2 else []


def test_a_copy_that_ends_later_is_looked_for() -> None:
    plans = [StepPlan(step_id=1, pulls=(PULL,)), StepPlan(step_id=2)]
    bench = Bench(*plans, commands=[[PEER_UP]], exchange=LateExchange())
    bench.follower.run()
    assert bench.waits == [None, follower_module.PULL_LOOK_S]
    assert bench.feed.reports == [PullResult(2, 1024, 1.0, 2.0)]


def test_a_failed_collective_ends_it() -> None:
    bench = Bench(prompt_plan())

    def launch(plan: StepPlan) -> None:
        raise CollectivesFailed("stage 0, tp rank 1: a sum failed")

    bench.executor.launch = launch
    with pytest.raises(CollectivesFailed):
        bench.follower.run()
    assert bench.feed.reports == []


def test_a_beat_is_answered_also_between_plans_that_came_together() -> None:
    plans = [StepPlan(step_id=1), StepPlan(step_id=2)]
    bench = Bench(*plans, commands=[[Audit(1)], [Audit(2)], [Audit(3)]], together=True)
    bench.follower.run()
    assert bench.link.answers == [1, 2, 3]


def test_with_a_beat_it_follows_the_daemon_s_log_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Bench(StepPlan(step_id=1), commands=[[Audit(1, logging.ERROR)]]).follower.run()
        assert logging.getLogger().level == logging.ERROR


def test_that_it_has_let_go_of_a_pool_is_said_when_a_plan_has_closed_it() -> None:
    plans = (StepPlan(step_id=1), StepPlan(step_id=2, unmapped=(("there", 5),)))
    bench = Bench(*plans, commands=[[PEER_UP], [PeerDown("there", 5)]])
    bench.follower.run()
    assert bench.link.released == [("there", 5)]
    assert not bench.exchange.knows("there", 5)
