"""Devices on which workers die again and again are left alone, while others can do their work."""

import asyncio

from daemon.quarantine import Quarantine
from tests.daemon.stage import MakeStage, PlayedProcess, Stage


def test_three_deaths_within_ten_minutes_are_too_many() -> None:
    quarantine = Quarantine(max_deaths=3)
    assert quarantine.died("n0:1", "killed", 0.0) is None
    assert quarantine.died("n0:1", "killed", 300.0) is None
    assert quarantine.died("n0:2", "killed", 301.0) is None
    assert quarantine.died("n0:1", "killed by SIGSEGV", 599.0) == (
        "device n0:1 is quarantined: workers died on it 3 times within 10 minutes, "
        "last: killed by SIGSEGV"
    )


def test_deaths_that_are_far_apart_are_forgotten() -> None:
    quarantine = Quarantine(max_deaths=3)
    assert [quarantine.died("n0:1", "killed", 400.0 * i) for i in range(20)] == [None] * 20


def test_a_lifted_quarantine_begins_anew() -> None:
    quarantine = Quarantine(max_deaths=2)
    quarantine.died("n0:1", "killed", 0.0)
    quarantine.lift("n0:1")
    assert quarantine.died("n0:1", "killed", 1.0) is None


def test_zero_means_never() -> None:
    quarantine = Quarantine(max_deaths=0)
    assert [quarantine.died("n0:1", "killed", 0.0) for _ in range(20)] == [None] * 20


async def ready_again(stage: Stage, last: PlayedProcess, num_deaths: int) -> PlayedProcess:
    for _ in range(num_deaths):
        last.end("killed by SIGSEGV")
        last = await stage.ready()
    return last


async def test_an_instance_on_a_bad_device_stays_down_until_the_operator_wants_it_back(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(prefill=1, decode=2)
    keeping = stage.keep_all()
    *_, bad = await stage.all_ready(3)
    bad = await ready_again(stage, bad, 2)
    ward = stage.supervisor.wards["decode-1"]
    bad.end("killed by SIGSEGV")
    await stage.until(lambda: ward.quarantined is not None)
    assert ward.state.startswith("device local:2 is quarantined: workers died on it 3 times")
    assert stage.controller.instances.can_serve
    assert stage.started.empty()
    await stage.supervisor.replace(ward)
    await stage.ready()
    assert ward.is_ready
    await stage.supervisor.stop()
    await keeping


async def test_an_instance_on_a_bad_device_is_tried_on_when_nobody_else_can_do_its_work(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(prefill=1, decode=1)
    keeping = stage.keep_all()
    *_, bad = await stage.all_ready(2)
    async with asyncio.timeout(30):
        await ready_again(stage, bad, 4)
    await stage.supervisor.stop()
    await keeping
