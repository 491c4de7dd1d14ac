"""Lives of instances: ready, dead, started again, given up."""

import asyncio

import pytest

from daemon.errors import ConfigError, NotReady, StartFailed
from daemon.generation import GenerationSpec
from ipc.messages import Broken, Hello, Prefill
from ipc.vocabulary import SamplingParams
from tests.daemon.stage import MakeStage


async def test_a_death_is_announced_and_the_instance_starts_again_as_a_new_epoch(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage()
    keeping = stage.keep()
    first = await stage.ready()
    first.end("exit code 1")
    second = await stage.ready()
    assert second.config.epoch != first.config.epoch
    assert (stage.ward.restarts, stage.ward.last_exit) == (1, "exit code 1")
    instance = stage.controller.instances.get("mixed-0")
    assert instance is not None
    assert instance.epoch == second.config.epoch
    second.kill()
    await stage.supervisor.stop()
    await keeping


async def test_what_an_earlier_epoch_still_says_is_not_heard(make_stage: MakeStage) -> None:
    stage = await make_stage()
    keeping = stage.keep()
    first = await stage.ready()
    first.end("exit code 1")
    second = await stage.started.get()
    stage.say(first, Broken("too late"))
    stage.say(second, Hello(second.config.name, second.pid))
    assert stage.ward.state == "loading"
    second.kill()
    await stage.supervisor.stop()
    await keeping


async def test_what_dies_twice_before_it_was_ready_is_given_up_B22(make_stage: MakeStage) -> None:
    stage = await make_stage()
    keeping = stage.keep()
    for _ in range(2):
        (await stage.started.get()).end("exit code 3")
    with pytest.raises(StartFailed, match="mixed-0 died twice before it was ready: exit code 3"):
        await keeping


async def test_what_can_never_start_is_not_tried_again(make_stage: MakeStage) -> None:
    stage = await make_stage()
    keeping = stage.keep()
    process = await stage.started.get()
    stage.say(process, Broken("no such model"))
    with pytest.raises(ConfigError, match="mixed-0 cannot start: no such model"):
        await keeping
    assert process.has_ended


async def test_a_stop_while_a_process_is_being_started_ends_it_too_C8(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage()
    stage.may_start.clear()
    keeping = stage.keep()
    await asyncio.sleep(0)  # into the start
    await stage.supervisor.stop()
    stage.may_start.set()
    await asyncio.wait_for(keeping, 5)
    assert stage.started.get_nowait().has_ended


async def test_what_cannot_start_again_later_does_not_end_the_daemon(make_stage: MakeStage) -> None:
    """A model file that vanished under a running service once ended all of it."""
    stage = await make_stage()
    keeping = stage.keep()
    (await stage.ready()).end("killed by SIGKILL")
    stage.say(await stage.started.get(), Broken("the model is not there"))
    await stage.ready()
    assert not keeping.done()
    assert stage.controller.instances.can_serve
    await stage.supervisor.stop()
    await keeping


async def test_a_process_that_cannot_be_spawned_is_tried_again(make_stage: MakeStage) -> None:
    """Descriptors used up by idle connections once ended the daemon when a worker died."""
    stage = await make_stage()
    keeping = stage.keep()
    process = await stage.ready()
    stage.spawn_errors = [OSError(24, "Too many open files")]
    process.end("killed by SIGKILL")
    await stage.ready()
    assert stage.ward.last_exit == "its processes cannot be started: Too many open files"
    await stage.supervisor.stop()
    await keeping


def request() -> GenerationSpec:
    return GenerationSpec(prompt=(1, 2), sampling=SamplingParams(max_tokens=4, seed=1))


async def test_who_comes_while_the_only_one_of_its_role_starts_again_waits_for_it_B1(
    make_stage: MakeStage,
) -> None:
    """Newcomers once got 503 until it was back, while those who had come before were served."""
    stage = await make_stage(prefill=1, decode=1)
    keeping = stage.keep_all()
    first, _ = await stage.all_ready(2)
    stage.may_start.clear()
    first.end("killed by SIGKILL")
    await stage.until(lambda: stage.controller.instances.get("prefill-0") is None)
    with stage.controller.submit([request()]) as call:
        stage.may_start.set()
        again = await stage.ready()
        assert [c.prompt for name, c in stage.link.sent if isinstance(c, Prefill)] == [(1, 2)]
        assert not call.requests[0].is_ended
    assert stage.controller.instances.returning == {}
    assert again.config.name == first.config.name
    await stage.supervisor.stop()
    await keeping


async def test_nobody_waits_any_more_when_the_next_life_fails_too_B13(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(prefill=1, decode=1)
    keeping = stage.keep_all()
    first, _ = await stage.all_ready(2)
    first.end("killed by SIGKILL")
    (await stage.started.get()).end("exit code 1")
    await stage.until(lambda: stage.supervisor.wards["prefill-0"].restarts == 2)
    with pytest.raises(NotReady) as refused:
        stage.controller.submit([request()])
    assert (refused.value.status, refused.value.retry_after_s) == (503, 2)
    await stage.ready()
    with stage.controller.submit([request()]):
        assert stage.controller.num_open == 1
    await stage.supervisor.stop()
    await keeping


async def test_nobody_waits_for_an_instance_of_a_daemon_that_stops(make_stage: MakeStage) -> None:
    stage = await make_stage()
    keeping = stage.keep()
    await stage.ready()
    await stage.supervisor.stop()
    await keeping
    assert not stage.controller.instances.can_take
