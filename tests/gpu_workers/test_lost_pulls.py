"""Pulls whose source ended before all was copied: given back, told, and nothing runs on them."""

from gpu_workers.group import GroupExchange
from gpu_workers.step_plan import Pull, PullResult
from ipc.messages import Abort, Refused
from ipc.vocabulary import Role
from tests.gpu_workers.rig import BLOCK_SIZE, Rig
from tests.gpu_workers.scripted_engine import ScriptedExchange, ScriptedExecutor
from tests.gpu_workers.test_scheduler import decode, tokens_of


class LosingExchange(ScriptedExchange):
    """Loses the pulls of some requests."""

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self._lost = lost

    def begin(self, pull: Pull) -> None:
        super().begin(pull)
        request_id = pull.handle.request_id
        if request_id in self._lost:
            self._finished[-1] = PullResult(request_id, 0, 1.0, 2.0, loss="no owner")


def rig_that_loses(*lost: int) -> Rig:
    exchange = LosingExchange(*lost)
    return Rig(Role.DECODE, engine=(ScriptedExecutor(exchange, BLOCK_SIZE), exchange))


def test_a_lost_pull_is_refused_with_its_reason_and_holds_nothing_A1_A4_A14() -> None:
    rig = rig_that_loses(1)
    rig.tell(decode(rig, 1, 10))
    rig.tell(decode(rig, 2, 10))
    events = rig.run()
    refused = [event for event in events if isinstance(event, Refused)]
    assert refused == [Refused(1, (1000,), "not all blocks were pulled: no owner")]
    assert tokens_of(events, 1000) == []
    assert tokens_of(events, 2000)
    assert rig.is_all_free
    assert rig.scheduler.counters.pull_faults == 0


def test_a_lost_pull_that_was_aborted_ends_once_A12() -> None:
    rig = rig_that_loses(1)
    rig.tell(decode(rig, 1, 10))
    plan = rig.scheduler.plan()
    assert plan is not None
    launched = rig.executor.launch(plan)
    rig.scheduler.launched(plan, 1.0)
    rig.tell(Abort(1, (1000,)))
    rig.scheduler.collect(rig.executor.collect(launched), started_s=1.0, ended_s=2.0)
    for result in rig.exchange.finished():
        rig.scheduler.pulled(result)
    events = rig.run()
    assert [type(event) for event in events if 1000 in getattr(event, "seq_ids", ())] == [Refused]
    assert rig.is_all_free


class OneFollower:
    """Has copied its part."""

    def take_pulls(self) -> list[PullResult]:
        return [PullResult(1, 1024, 1.0, 3.0)]


def test_a_pull_that_one_rank_lost_is_lost_for_all() -> None:
    exchange = LosingExchange(1)
    rig = rig_that_loses()
    exchange.begin(Pull(decode(rig, 1, 4).handle, (0,)))
    (whole,) = GroupExchange(exchange, OneFollower(), 2).finished()  # type: ignore[arg-type]
    assert whole.is_lost
    assert whole.loss == "no owner"
