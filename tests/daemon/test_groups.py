"""Instances of several workers: ready together, introduced by what overlaps, dead together."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from daemon.errors import ConfigError
from daemon.generation import GenerationSpec
from daemon.node import Node
from ipc.messages import Broken, Hello, Loading, PeerDown, PeerUp, Prefill
from ipc.vocabulary import SamplingParams
from tests.daemon.stage import MakeStage, PlayedProcess, Stage


async def ended(stage: Stage, keeping: "asyncio.Future[None] | asyncio.Future[list[None]]") -> None:
    for ward in stage.supervisor.wards.values():
        for process in ward.life.workers.values() if ward.life else ():
            process.kill()
    await stage.supervisor.stop()
    await keeping


def heard(stage: Stage, kind: type) -> list[tuple[str, str]]:
    """(who, about whom) of such commands."""
    return [
        (str(name), str(command.worker if isinstance(command, PeerUp) else command.instance))
        for name, command in stage.link.sent
        if isinstance(command, kind) and isinstance(command, PeerUp | PeerDown)
    ]


def by_name(processes: Sequence[PlayedProcess]) -> dict[str, PlayedProcess]:
    return {str(process.config.name): process for process in processes}


async def test_an_instance_is_ready_when_its_last_worker_is_B7(make_stage: MakeStage) -> None:
    stage = await make_stage(mixed=1, mixed_tp=2)
    keeping = stage.keep()
    stage.say_ready(await stage.started.get())
    assert not stage.ward.is_ready
    (last,) = await stage.all_ready(1)
    assert str(last.config.name) == "mixed-0/0.1"
    assert stage.controller.instances.can_serve
    await ended(stage, keeping)


async def test_progress_is_that_of_the_worker_furthest_behind(make_stage: MakeStage) -> None:
    stage = await make_stage(mixed=1, mixed_pp=2)
    keeping = stage.keep()
    first, second = [await stage.started.get() for _ in range(2)]
    stage.say(first, Loading("loading weights", 0.9))
    assert stage.ward.state == "starting"
    stage.say(second, Hello(second.config.name, second.pid))
    assert stage.ward.state == "loading"
    stage.say(second, Loading("loading weights", 0.5))
    assert stage.ward.state == "loading weights 50%"
    stage.say_ready(second)
    assert stage.ward.state == "loading weights 90%"
    await ended(stage, keeping)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_blocks": 7}, "num_blocks differs: 8 on mixed-0/0.0, 7 on mixed-0/1.0"),
        ({"block_size": 16}, "block_size differs: 4 on mixed-0/0.0, 16 on mixed-0/1.0"),
        ({"dtype": "bfloat16"}, "dtype differs: float32 on mixed-0/0.0, bfloat16 on mixed-0/1.0"),
    ],
)
async def test_ranks_whose_blocks_differ_are_no_instance(
    make_stage: MakeStage, change: dict[str, object], why: str
) -> None:
    stage = await make_stage(mixed=1, mixed_pp=2)
    keeping = stage.keep()
    first, second = [await stage.started.get() for _ in range(2)]
    stage.say_ready(first)
    stage.say_ready(second, **change)
    with pytest.raises(ConfigError, match=why):
        await keeping
    assert first.has_ended
    assert second.has_ended


async def test_pools_whose_blocks_cannot_be_copied_are_refused_with_both_values_B9(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(prefill=1, decode=1)
    prefill, decode = stage.supervisor.wards.values()
    keeping = stage.keep(prefill)
    await stage.ready()
    refused = stage.keep(decode)
    stage.say_ready(await stage.started.get(), block_size=16)
    with pytest.raises(
        ConfigError,
        match="decode-0 cannot pull from prefill-0: block_size differs: 4 at the source, 16 here",
    ):
        await refused
    assert heard(stage, PeerUp) == []
    await ended(stage, keeping)


async def test_only_pools_that_overlap_are_introduced_and_only_to_who_may_pull(
    make_stage: MakeStage,
) -> None:
    """Two prefill stages of two layers to two decode ranks of two heads each, and to a pipeline."""
    stage = await make_stage(prefill=2, prefill_pp=2, decode=1, decode_tp=2, mixed=1, mixed_pp=2)
    keeping = stage.keep_all()
    processes = by_name(await stage.all_ready(8))
    expected = []
    for source in ("prefill-0", "prefill-1"):
        expected += [(f"decode-0/0.{r}", f"{source}/{s}.0") for r in (0, 1) for s in (0, 1)]
        expected += [(f"mixed-0/{s}.0", f"{source}/{s}.0") for s in (0, 1)]
    assert sorted(heard(stage, PeerUp)) == sorted(expected)
    given = [(name, str(about.worker)) for name, p in processes.items() for about in p.given]
    assert sorted(given) == sorted(expected)
    await ended(stage, keeping)


async def test_a_death_is_told_to_the_leaders_of_who_may_pull_B3(make_stage: MakeStage) -> None:
    stage = await make_stage(prefill=2, decode=1, decode_tp=2)
    keeping = stage.keep_all()
    processes = by_name(await stage.all_ready(4))
    processes["prefill-0/0.0"].end("killed by SIGKILL")
    again = await stage.started.get()
    assert heard(stage, PeerDown) == [("decode-0/0.0", "prefill-0")]
    assert again.config.name.instance == "prefill-0"
    await ended(stage, keeping)


async def test_the_workers_of_an_epoch_meet_at_a_place_of_their_own_C11(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(mixed=1, mixed_tp=2)
    keeping = stage.keep()
    first, second = await stage.all_ready(2)
    places = (first.config.group_endpoint, first.config.rendezvous)
    assert places == (second.config.group_endpoint, second.config.rendezvous)
    path = Path(places[0].removeprefix("ipc://"))
    os.mkfifo(path)  # as the leader's socket would be
    second.end("exit code 1")
    third = await stage.started.get()
    assert path.name not in os.listdir(path.parent)
    assert not {third.config.group_endpoint, third.config.rendezvous} & set(places)
    await ended(stage, keeping)


async def test_a_worker_alone_meets_nobody(make_stage: MakeStage) -> None:
    stage = await make_stage()
    keeping = stage.keep()
    process = await stage.ready()
    assert (process.config.group_endpoint, process.config.rendezvous) == ("", "")
    await ended(stage, keeping)


@pytest.mark.parametrize("victim", range(4))
async def test_the_death_of_any_rank_ends_all_of_them_and_the_next_life_gets_the_request(
    make_stage: MakeStage, victim: int
) -> None:
    stage = await make_stage(mixed=1, mixed_tp=2, mixed_pp=2)
    keeping = stage.keep()
    processes = await stage.all_ready(4)
    spec = GenerationSpec(prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=4, seed=1))
    with stage.controller.submit([spec]) as call:
        processes[victim].end("killed by SIGKILL")
        leaders = [(await stage.all_ready(4))[0]]
        assert all(process.has_ended for process in processes)
        assert not call.requests[0].is_ended
        prefills = [command for _, command in stage.link.sent if isinstance(command, Prefill)]
        assert [prefill.prompt for prefill in prefills] == [(1, 2, 3), (1, 2, 3)]
        assert prefills[0].request_id != prefills[1].request_id
    assert leaders[0].config.epoch != processes[0].config.epoch
    assert stage.ward.restarts == 1
    assert f"{processes[victim].config.name} killed by SIGKILL" == stage.ward.last_exit
    assert stage.controller.num_open == 0
    text = stage.metrics.render({})[1].decode()
    counts = [li for li in text.splitlines() if li.startswith("distserve_requests_ended_total")]
    endings = [line for line in counts if not line.endswith(" 0.0")]
    assert endings == ['distserve_requests_ended_total{ending="aborted"} 1.0']
    await ended(stage, keeping)


async def test_a_follower_that_can_never_start_ends_the_instance(make_stage: MakeStage) -> None:
    stage = await make_stage(mixed=1, mixed_tp=2)
    keeping = stage.keep()
    first, second = [await stage.started.get() for _ in range(2)]
    stage.say_ready(first)
    stage.say(second, Broken("its slice is missing"))
    with pytest.raises(ConfigError, match="mixed-0 cannot start: its slice is missing"):
        await keeping
    assert first.has_ended


async def test_when_the_second_process_cannot_be_spawned_the_first_one_ends_too(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(mixed=1, mixed_tp=2)
    stage.spawn_errors = [None, OSError(24, "Too many open files")]
    keeping = stage.keep()
    assert await (await stage.started.get()).ended() == "killed by SIGKILL"
    await stage.all_ready(2)
    assert stage.ward.restarts == 1
    await ended(stage, keeping)


async def test_the_status_tells_the_shape_and_every_process(make_stage: MakeStage) -> None:
    stage = await make_stage(mixed=1, mixed_tp=2, mixed_pp=2)
    keeping = stage.keep()
    processes = await stage.all_ready(4)
    (told,) = Node("tiny", "1.0", stage.controller, stage.supervisor).status().instances
    assert (told.tp, told.pp, told.pid) == (2, 2, processes[0].pid)
    assert [(w.stage, w.tp_rank, w.device, w.pid) for w in told.workers] == [
        (i // 2, i % 2, i, process.pid) for i, process in enumerate(processes)
    ]
    await ended(stage, keeping)
