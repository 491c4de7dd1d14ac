"""A follower that draws on a GPU: steps are launched as plans come, and reported as they end."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpu_workers.device_watch import DeviceWatch
from gpu_workers.follower import Follower, Peers
from gpu_workers.plan_bus import Waiting
from gpu_workers.step_plan import (
    NewBlocks,
    NewSequence,
    PullResult,
    Row,
    StepPlan,
    StepResult,
)
from ipc.messages import Command
from ipc.vocabulary import DType, Parallelism
from tests.gpu_workers.cuda.played_instance import PlayedRank, played
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.driving import Driver, greedy

TEXTS = [b"Fear no more the heat o' the sun", b"nor the furious winter's rages", b"Thou"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible("llama-gqa", tmp_path_factory.mktemp("llama"))


class Feed:
    """All plans are there at once; who has reported on each of them is dismissed."""

    def __init__(self, plans: list[StepPlan]) -> None:
        self.plans = plans
        self.num_due = len(plans)
        self.reports: list[StepResult] = []

    @property
    def is_dismissed(self) -> bool:
        return len(self.reports) == self.num_due

    def receive(self) -> list[StepPlan]:
        plans, self.plans = self.plans, []
        return plans

    def report(self, result: StepResult | PullResult) -> None:
        assert isinstance(result, StepResult)
        self.reports.append(result)


class SilentLink:
    def send(self, event: object) -> None:
        raise AssertionError(f"there is nothing to tell the daemon: {event}")

    def receive(self, timeout_s: float | None) -> list[Command]:
        return []


def prompt(number: int, text: bytes) -> StepPlan:
    """A step of a prompt of its own; of the second one only a part, so that nothing is drawn."""
    is_whole = number != 2
    sequence = NewSequence(number, (0,), tuple(text), (), 0, greedy())
    return StepPlan(
        step_id=number,
        added=(sequence,),
        blocks=(NewBlocks(number, (2 * number, 2 * number + 1)),),
        rows=(Row(number, len(text) if is_whole else 9, is_whole),),
    )


def follow(last: PlayedRank, plans: list[StepPlan]) -> list[StepResult]:
    """Drive the last stage as its process would."""
    feed, exchange = Feed(plans), last.executor.exchange
    no_peers: Any = None
    with closing(DeviceWatch(last.executor.mark)) as device:
        wait = Waiting([device.waitable])
        Follower(
            SilentLink(),
            feed,
            last.executor,
            exchange,
            Peers(exchange, no_peers),
            wait=lambda timeout_s: None if feed.plans else wait(timeout_s),
            draws=True,
            device=device,
        ).run()
    return feed.reports


def test_steps_that_are_under_way_together_are_reported_in_order_as_the_device_ends_them(
    model_dir: Path,
) -> None:
    cpu = Driver(model_dir, dtype=DType.FP16)
    expected = [cpu.generate(text, 1) for text in TEXTS]
    with played(model_dir, Parallelism(1, 2)) as ranks:
        first, last = ranks.ranks
        plans = [prompt(number, text) for number, text in enumerate(TEXTS, 1)]
        for plan in plans:
            first.thread.submit(first.executor.launch, plan)
        reports = follow(last, plans)
    assert [result.step_id for result in reports] == [1, 2, 3]
    drawn = [list(row.token_ids) for result in reports for row in result.rows]
    assert drawn == [expected[0], expected[2]]
