"""Beats over a played instance: who is asked, who is replaced, what is told of it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client.parser import text_string_to_metric_families

from daemon.heartbeat import Heartbeat
from ipc.messages import Audit, Stats
from ipc.vocabulary import WorkerName
from tests.daemon.stage import MakeStage, PlayedProcess, Stage

BOUND_S = 8.0  # beats of a second


class Clock:
    """Stands still between beats."""

    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Pulse:
    """A stage under a heartbeat, and who of its workers answers."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.clock = Clock()
        self.heartbeat = Heartbeat(
            stage.supervisor,
            stage.controller.instances,
            stage.metrics,
            wedged_after_s=BOUND_S,
            clock=self.clock,
        )

    def beats(self, count: int, *, answering: list[PlayedProcess]) -> None:
        for _ in range(count):
            self.stage.link.sent.clear()
            self.clock.now_s += 1.0
            self.heartbeat.beat()
            for process in answering:
                for name, command in self.stage.link.sent:
                    if isinstance(command, Audit) and name == process.config.name:
                        self.heartbeat.answered((name, process.config.epoch), command.beat)

    def metric(self, name: str) -> dict[str, float]:
        text = self.stage.metrics.render({})[1].decode()
        return {
            sample.labels["instance"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }


@asynccontextmanager
async def kept(make_stage: MakeStage, **shape: int) -> AsyncIterator[Stage]:
    """A stage whose instances are kept alive; in the end nobody is waited for."""
    stage = await make_stage(**shape)
    keeping = stage.keep_all()
    yield stage
    for ward in stage.supervisor.wards.values():
        for process in ward.life.workers.values() if ward.life else ():
            process.kill()
    await stage.supervisor.stop()
    await keeping


async def test_every_worker_that_is_ready_is_asked_with_every_beat(make_stage: MakeStage) -> None:
    async with kept(make_stage, mixed=1, mixed_pp=2) as stage:
        pulse = Pulse(stage)
        pulse.beats(1, answering=[])
        assert stage.link.sent == [], "nobody is ready yet"
        processes = await stage.all_ready(2)
        for number in (2, 3):
            pulse.beats(1, answering=processes)
            level = logging.getLogger().level
            assert stage.link.sent == [
                (WorkerName("mixed-0", stage=stage_of), Audit(number, level)) for stage_of in (0, 1)
            ]


async def test_one_that_falls_silent_is_replaced_and_the_others_are_not_B19(
    make_stage: MakeStage,
) -> None:
    async with kept(make_stage, mixed=2) as stage:
        stuck, lively = await stage.all_ready(2)
        pulse = Pulse(stage)
        pulse.beats(3, answering=[stuck, lively])
        pulse.beats(9, answering=[lively])
        ward = stage.supervisor.wards[stuck.config.name.instance]
        fresh = await stage.ready()
        assert stuck.has_ended
        assert not lively.has_ended
        assert fresh.config.name == stuck.config.name
        assert ward.last_exit == f"wedged: {stuck.config.name} did not answer for 8 s"
        assert pulse.metric("distserve_wedged_total") == {
            stuck.config.name.instance: 1,
            lively.config.name.instance: 0,
        }
        pulse.beats(8, answering=[fresh, lively])
        assert not fresh.has_ended


async def test_a_silent_follower_ends_its_whole_instance(make_stage: MakeStage) -> None:
    async with kept(make_stage, mixed=1, mixed_pp=2) as stage:
        leader, follower = await stage.all_ready(2)
        pulse = Pulse(stage)
        pulse.beats(1, answering=[leader, follower])
        pulse.beats(9, answering=[leader])
        await stage.all_ready(2)
        assert leader.has_ended
        assert follower.has_ended
        assert stage.ward.last_exit == "wedged: mixed-0/1.0 did not answer for 8 s"


async def test_it_is_counted_once_however_long_its_processes_take_to_end(
    make_stage: MakeStage,
) -> None:
    async with kept(make_stage) as stage:
        await stage.ready()
        pulse = Pulse(stage)
        pulse.beats(30, answering=[])  # its supervisor has had no turn yet
        assert pulse.metric("distserve_wedged_total") == {"mixed-0": 1}


async def test_the_time_without_progress_is_shown_and_is_over_with_the_life(
    make_stage: MakeStage,
) -> None:
    async with kept(make_stage) as stage:
        process = await stage.ready()
        pulse = Pulse(stage)
        pulse.beats(2, answering=[process])
        pulse.beats(5, answering=[])
        age_s = "distserve_instance_progress_age_seconds"
        assert pulse.metric(age_s) == {"mixed-0": 4}
        process.end("exit code 1")
        await stage.ready()
        assert pulse.metric(age_s) == {"mixed-0": 0}


async def test_readiness_is_told_who_gets_nowhere_but_not_who_said_so_D2(
    make_stage: MakeStage,
) -> None:
    async with kept(make_stage) as stage:
        process = await stage.ready()
        pulse = Pulse(stage)
        pulse.beats(2, answering=[process])
        assert pulse.heartbeat.still_s == {"mixed-0": 0}
        pulse.beats(5, answering=[])
        assert pulse.heartbeat.still_s == {"mixed-0": 4}
        instance = stage.controller.instances.get("mixed-0")
        assert instance is not None
        instance.stats = Stats(busy_until_s=pulse.clock.now_s + 60)
        pulse.beats(1, answering=[])
        assert pulse.heartbeat.still_s == {}


def leave_a_prompt_waiting(stage: Stage, *, blocks_free: int) -> None:
    """It needs four of eight blocks; those that are not free are held for readers."""
    instance = stage.controller.instances.get("mixed-0")
    assert instance is not None
    instance.stats = Stats(
        num_waiting=1, blocks_total=8, blocks_free=blocks_free, blocks_held=8 - blocks_free
    )
    instance.queued.add(1, arrival=1, num_tokens=16, now_s=0.0)


async def test_a_leader_that_answers_and_leaves_a_prompt_that_fits_is_replaced(
    make_stage: MakeStage,
) -> None:
    async with kept(make_stage) as stage:
        process = await stage.ready()
        pulse = Pulse(stage)
        leave_a_prompt_waiting(stage, blocks_free=7)
        pulse.beats(10, answering=[process])
        assert (await stage.ready()) is not process
        assert stage.ward.last_exit == "wedged: it has work and took no step for 8 s"


async def test_a_leader_whose_next_prompt_waits_for_readers_is_let_be(
    make_stage: MakeStage,
) -> None:
    async with kept(make_stage) as stage:
        process = await stage.ready()
        pulse = Pulse(stage)
        leave_a_prompt_waiting(stage, blocks_free=3)
        pulse.beats(30, answering=[process])
        assert not stage.supervisor.watched_lives()[0].is_ending
