"""Signs of life: what a leader answers to a beat, and what it says before it falls silent."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_workers.leader import Leader
from gpu_workers.step_plan import PullResult, StepPlan, StepResult
from ipc.messages import Audit, Begun, Command, Exit, Prefilled, Stats, Tokens
from ipc.vocabulary import Role
from tests.gpu_workers.rig import BLOCK_SIZE, Rig, prefill
from tests.gpu_workers.scripted_engine import ScriptedExchange, ScriptedExecutor
from tests.gpu_workers.test_leader import DECODE, PEER_UP, ScriptedLink, lead, of_type


def books(link: ScriptedLink) -> list[Stats]:
    return [event for event in link.events if isinstance(event, Stats)]


class WatchedExecutor(ScriptedExecutor):
    """Notes the books where they were the last that the daemon was told before a step."""

    def __init__(self, exchange: ScriptedExchange) -> None:
        super().__init__(exchange, BLOCK_SIZE)
        self.link: ScriptedLink
        self.told: list[Stats | None] = []
        self.begun: list[tuple[int, ...]] = []  # told of before the first step

    def launch(self, plan: StepPlan) -> StepResult:
        if plan.rows:
            last = self.link.events[-1]
            self.told.append(last if isinstance(last, Stats) else None)
            self.begun = self.begun or [e.request_ids for e in of_type(self.link, Begun)]
        return super().launch(plan)


def watched(role: Role, *batches: list[Command]) -> tuple[ScriptedLink, WatchedExecutor]:
    exchange = ScriptedExchange()
    executor = WatchedExecutor(exchange)
    rig = Rig(role, engine=(executor, exchange))
    executor.link = link = ScriptedLink(*batches)
    Leader(link, rig.scheduler, executor, exchange, lambda peer: None).run()
    return link, executor


def test_a_beat_is_answered_by_its_number_and_by_an_audit_also_when_no_work_comes_A10() -> None:
    rig = Rig(Role.PREFILL)
    link = ScriptedLink([Audit(1)], [Audit(2)])
    leader = Leader(link, rig.scheduler, rig.executor, rig.exchange, lambda peer: None)
    rig.scheduler.pool.reserve(1)
    leader.run()
    assert [stats.beat for stats in books(link)] == [0, 1, 2]
    faults = [stats.audit_failures for stats in books(link)]
    assert faults[0] > 0
    assert len(set(faults)) == 1, "a fault that stays is counted once"


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.level
    yield root
    root.setLevel(before)


def test_with_a_beat_it_follows_the_daemon_s_log_level(root_logger: logging.Logger) -> None:
    levels: list[int] = []

    class Overheard(ScriptedLink):
        def receive(self, timeout_s: float | None) -> list[Command]:
            levels.append(root_logger.level)
            return super().receive(timeout_s)

    root_logger.setLevel(logging.INFO)
    rig = Rig(Role.PREFILL)
    link = Overheard([Audit(1, logging.DEBUG)], [Audit(2)], [Audit(3, logging.ERROR)])
    Leader(link, rig.scheduler, rig.executor, rig.exchange, lambda peer: None).run()
    assert list(dict.fromkeys(levels)) == [logging.INFO, logging.DEBUG, logging.ERROR]


def test_a_step_that_may_be_long_is_announced_before_it_begins() -> None:
    """The first one always: nobody knows yet how fast this machine is."""
    before_s = time.monotonic()
    link, executor = watched(Role.PREFILL, [prefill(1, 5)])
    (told,) = executor.told
    assert told is not None
    assert told.busy_until_s is not None
    assert told.busy_until_s > before_s + 5
    assert books(link)[-1].busy_until_s is None, "its end is told as well"


def test_a_step_like_many_before_is_not_announced() -> None:
    _, executor = watched(Role.MIXED, [prefill(1, 5, max_tokens=100)])
    assert executor.told[0] is not None
    assert executor.told[-1] is None


def test_the_end_of_an_announced_step_is_told_though_work_goes_on() -> None:
    link, _ = watched(Role.MIXED, [prefill(1, 5, max_tokens=6)])
    kinds = [type(event) for event in link.events]
    first_end = kinds.index(Prefilled)
    after = link.events[first_end + 1]
    assert isinstance(after, Stats)
    assert after.busy_until_s is None
    assert Tokens in kinds[first_end + 2 :]


def test_that_a_prompt_has_its_turn_is_told_before_its_step_begins_D14() -> None:
    """During the step nobody hears anything of it."""
    link, executor = watched(Role.PREFILL, [prefill(1, 5), prefill(2, 5)])
    assert executor.begun == [(1, 2)]
    assert [event.request_ids for event in of_type(link, Begun)] == [(1, 2)]


class StuckExchange(ScriptedExchange):
    """Copies that never end."""

    def finished(self) -> list[PullResult]:
        return []


class ImpatientLink(ScriptedLink):
    """Beats once while a pull is looked for, and ends it then."""

    def __init__(self, *batches: Any) -> None:
        super().__init__(*batches)
        self._later: list[list[Command]] = [[Audit(9)], [], [Exit()]]

    def receive(self, timeout_s: float | None) -> list[Command]:
        if timeout_s is None or timeout_s == 0:
            return super().receive(timeout_s)
        return self._later.pop(0)


def test_the_oldest_pull_under_way_is_told_with_the_time_of_its_begin_A22() -> None:
    exchange = StuckExchange()
    exchange.known.add(("there", 5))
    executor = ScriptedExecutor(exchange, BLOCK_SIZE)
    rig = Rig(Role.DECODE, engine=(executor, exchange))
    link = ImpatientLink([DECODE])
    before_s = time.monotonic()
    Leader(link, rig.scheduler, executor, exchange, lambda peer: None).run()
    answer = next(stats for stats in books(link) if stats.beat == 9)
    assert answer.pull_since_s is not None
    assert before_s <= answer.pull_since_s <= time.monotonic()


def test_a_pull_that_has_ended_is_not_told() -> None:
    link = lead(Rig(Role.DECODE), [PEER_UP, DECODE])
    assert len(of_type(link, Tokens)) == 2
    assert books(link)[-1].pull_since_s is None
