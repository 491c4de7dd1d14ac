"""Pools in a device's memory are closed by all readers before their owner starts again."""

import asyncio

import pytest

from daemon import partings
from ipc.messages import PeerDown, Ready, Released
from tests.daemon.stage import MakeStage, PlayedProcess, Stage, layout_of


async def pair(make_stage: MakeStage) -> tuple[Stage, PlayedProcess, PlayedProcess]:
    """A prefill instance whose pool is a device's memory, and a decode instance that reads it."""
    stage = await make_stage(mixed=0, prefill=1, decode=1)
    stage.keeping = stage.keep_all()  # type: ignore[attr-defined]
    source, reader = [await stage.started.get() for _ in range(2)]
    for process in (source, reader):
        stage.say(process, on_device(process))
    await stage.until(lambda: all(ward.is_ready for ward in stage.supervisor.wards.values()))
    return stage, source, reader


def on_device(process: PlayedProcess) -> Ready:
    return Ready(layout_of(process.config), "played", 0.1, is_device_memory=True)


async def end(stage: Stage) -> None:
    await stage.supervisor.stop()
    await stage.keeping  # type: ignore[attr-defined]


def parted_from(process: PlayedProcess) -> Released:
    return Released(process.config.name.instance, process.config.epoch)


async def test_the_owner_starts_again_only_when_its_reader_has_let_go_B2(
    make_stage: MakeStage,
) -> None:
    stage, source, reader = await pair(make_stage)
    source.end("killed by SIGKILL")
    gone = PeerDown(source.config.name.instance, source.config.epoch)
    await stage.until(lambda: (reader.config.name, gone) in stage.link.sent)
    with pytest.raises(TimeoutError):  # well beyond the back-off before a start
        await asyncio.wait_for(stage.started.get(), 0.5)
    stage.say(reader, parted_from(source))
    reborn = await stage.started.get()
    assert reborn.config.name == source.config.name
    assert not reader.has_ended
    for process in (reborn, reader):
        process.kill()
    await end(stage)


async def test_a_reader_that_does_not_let_go_in_time_is_replaced(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partings, "LETTING_GO_S", 0.01)
    stage, source, reader = await pair(make_stage)
    source.end("killed by SIGKILL")
    reborn = [await stage.started.get() for _ in range(2)]
    assert {p.config.name for p in reborn} == {source.config.name, reader.config.name}
    assert reader.has_ended
    ward = stage.supervisor.wards[reader.config.name.instance]
    assert ward.last_exit == "it did not let go of the pools of prefill-0"
    for process in reborn:
        process.kill()
    await end(stage)


async def test_a_reader_that_dies_has_let_go(make_stage: MakeStage) -> None:
    stage, source, reader = await pair(make_stage)
    source.end("killed by SIGKILL")
    reader.end("killed by SIGKILL")
    for process in [await stage.started.get() for _ in range(2)]:
        process.kill()
    await end(stage)


async def test_a_word_about_another_epoch_is_not_enough(make_stage: MakeStage) -> None:
    stage, source, reader = await pair(make_stage)
    source.end("killed by SIGKILL")
    stage.say(reader, Released(source.config.name.instance, source.config.epoch + 1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stage.started.get(), 0.5)
    stage.say(reader, parted_from(source))
    (await stage.started.get()).kill()
    reader.kill()
    await end(stage)
