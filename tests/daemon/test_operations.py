"""Restarting, adding and removing instances of a running node, and taking over a placement."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from daemon.generation import GenerationSpec
from daemon.model_sizes import ModelOutline
from daemon.neighbours import Neighbours
from daemon.operations import OperationRefused, Operations, Parts
from ipc.messages import Prefill
from ipc.vocabulary import InstanceSpec, Parallelism, Placement, Role, SamplingParams
from tests.daemon.stage import MODEL, MakeStage, Stage

ALONE = Parallelism()
OUTLINE = ModelOutline(sizes=MODEL, head_dim=1, num_weights=100)


class Town:
    """A stage whose processes become ready by themselves and leave when they are told to."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.may_be_ready = True
        self.hopeless: set[str] = set()  # instances that die before they are ready
        self.operations = Operations(
            Parts(
                stage.config,
                OUTLINE,
                stage.controller,
                stage.supervisor,
                stage.configs,
                stage.capacity,
            )
        )

    async def play(self) -> None:
        while True:
            process = await self.stage.started.get()
            if self.may_be_ready and process.config.name.instance not in self.hopeless:
                self.stage.say_ready(process)
            else:
                process.end("exit code 1")

    @property
    def names(self) -> list[str]:
        return list(self.stage.supervisor.wards)

    def epoch(self, name: str) -> int:
        life = self.stage.supervisor.wards[name].life
        assert life is not None
        return life.epoch


class Far(Neighbours):
    """A node that every instance needs, until it is lost."""

    is_lost = False

    def trouble(self, spec: InstanceSpec) -> str | None:
        return "far is not joined: it is lost" if self.is_lost else None

    async def until_joined(self, spec: InstanceSpec) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def town_of(
    make_stage: MakeStage, *, neighbours: Neighbours | None = None, **counts: int
) -> AsyncIterator[Town]:
    town = Town(await make_stage(neighbours=neighbours, **counts))
    stage = town.stage
    async with asyncio.TaskGroup() as house:
        running = house.create_task(stage.supervisor.run())
        playing = house.create_task(town.play())
        wards = stage.supervisor.wards.values()
        while not all(ward.is_ready for ward in wards):
            await stage.supervisor.changed()
        try:
            yield town
        finally:
            await stage.supervisor.stop()
            await running
            playing.cancel()


async def test_a_restart_replaces_an_instance_and_is_no_fault_of_its(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        before = town.epoch("decode-0")
        await town.operations.restart("decode-0", 1.0)
        ward = town.stage.supervisor.wards["decode-0"]
        assert town.epoch("decode-0") != before
        assert (ward.is_ready, ward.restarts, ward.last_exit) == (True, 0, None)
        assert town.stage.controller.instances.promised == {}


async def test_requests_that_come_during_a_restart_wait_for_its_end(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, mixed=1) as town:
        town.stage.may_start.clear()
        restarting = asyncio.ensure_future(town.operations.restart("mixed-0", 1.0))
        while town.stage.controller.instances.get("mixed-0") is not None:
            await town.stage.supervisor.changed()
        spec = GenerationSpec(prompt=(1, 2), sampling=SamplingParams(max_tokens=4, seed=1))
        with town.stage.controller.submit([spec]) as call:
            town.stage.may_start.set()
            await restarting
            assert [c.prompt for _, c in town.stage.link.sent if isinstance(c, Prefill)] == [(1, 2)]
            assert not call.requests[0].is_ended


async def test_what_is_left_at_the_deadline_of_a_restart_goes_on_with_the_successor(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, mixed=1) as town:
        spec = GenerationSpec(prompt=(1, 2), sampling=SamplingParams(max_tokens=4, seed=1))
        with town.stage.controller.submit([spec]) as call:
            await town.operations.restart("mixed-0", 0.05)
            prefills = [c.prompt for _, c in town.stage.link.sent if isinstance(c, Prefill)]
            assert prefills == [(1, 2), (1, 2)]
            assert not call.requests[0].is_ended


async def test_an_instance_that_does_not_come_back_is_told(make_stage: MakeStage) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        town.may_be_ready = False
        with pytest.raises(OperationRefused, match="decode-0 did not come back at once: exit code"):
            await town.operations.restart("decode-0", 1.0)
        town.may_be_ready = True
        ward = town.stage.supervisor.wards["decode-0"]
        while not ward.is_ready:
            await town.stage.supervisor.changed()


async def test_a_restart_does_not_wait_for_a_node_that_is_lost(make_stage: MakeStage) -> None:
    far = Far()
    async with town_of(make_stage, neighbours=far, prefill=1, decode=1) as town:
        far.is_lost = True
        with pytest.raises(OperationRefused, match="decode-0 comes back later: far is not joined"):
            await town.operations.restart("decode-0", 1.0)


@pytest.mark.parametrize("order", ["restart", "remove"])
async def test_an_instance_that_is_taken_back_while_it_drains_stays(
    make_stage: MakeStage, order: str
) -> None:
    async with town_of(make_stage, mixed=2) as town:
        before, controller = town.epoch("mixed-0"), town.stage.controller
        specs = [
            GenerationSpec(prompt=(i, 2), sampling=SamplingParams(max_tokens=4, seed=1))
            for i in range(2)
        ]
        with controller.submit(specs):
            ordered = asyncio.ensure_future(getattr(town.operations, order)("mixed-0", 60.0))
            await asyncio.sleep(0)
            controller.undrain_instance("mixed-0")
            with pytest.raises(OperationRefused, match="mixed-0 was taken back while it was being"):
                await ordered
        assert town.epoch("mixed-0") == before


async def test_an_instance_is_added_on_free_devices_and_removed_again(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        assert await town.operations.add(Role.DECODE, Parallelism(2, 2)) == "decode-1"
        (spec,) = [s for s in town.stage.configs.own_instances if s.name == "decode-1"]
        assert [segment.devices for segment in spec.segments] == [(2, 3), (4, 5)]
        assert town.stage.supervisor.wards["decode-1"].is_ready
        await town.operations.remove("decode-1", 1.0)
        assert town.names == ["prefill-0", "decode-0"]
        assert [s.name for s in town.stage.configs.own_instances] == town.names
        assert await town.operations.add(Role.DECODE, ALONE) == "decode-1"


async def test_an_instance_that_cannot_be_started_is_not_kept(make_stage: MakeStage) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        town.may_be_ready = False
        with pytest.raises(OperationRefused, match="decode-1 could not be started: exit code 1"):
            await town.operations.add(Role.DECODE, ALONE)
        assert town.names == ["prefill-0", "decode-0"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("decode-0", "nobody would be left to decode"),
        ("prefill-0", "nobody would be left to prefill"),
        ("decode-7", "there is no instance 'decode-7'; there are: prefill-0, decode-0"),
    ],
)
async def test_what_cannot_be_removed_is_refused_and_stays(
    make_stage: MakeStage, name: str, why: str
) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        with pytest.raises(OperationRefused, match=why):
            await town.operations.remove(name, 1.0)
        with pytest.raises(OperationRefused, match=why):
            town.operations.dry_run_remove(name)
        assert town.names == ["prefill-0", "decode-0"]


async def test_a_shape_that_the_model_does_not_allow_is_refused(make_stage: MakeStage) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        with pytest.raises(OperationRefused, match=r"decode-1 cannot run: .*3"):
            await town.operations.add(Role.DECODE, Parallelism(3, 1))


async def test_another_operation_is_refused_while_one_is_under_way(make_stage: MakeStage) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        town.stage.may_start.clear()
        restarting = asyncio.ensure_future(town.operations.restart("decode-0", 1.0))
        await town.stage.supervisor.changed()
        with pytest.raises(OperationRefused, match="is under way: restart decode-0"):
            await town.operations.restart("prefill-0", 1.0)
        town.stage.may_start.set()
        await restarting


async def test_a_placement_is_taken_over_with_what_stays_left_alone(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, prefill=1, decode=2) as town:
        prefill, decode, _ = town.stage.configs.placement.instances
        kept = {name: town.epoch(name) for name in ("prefill-0", "decode-0")}
        wider = msgspec.structs.replace(decode, name="wide", parallelism=Parallelism(2, 1))
        segment = msgspec.structs.replace(decode.segments[0], devices=(2, 3))
        wider = msgspec.structs.replace(wider, segments=(segment,))
        placement = Placement(version=1, instances=(prefill, decode, wider))
        assert town.operations.change_to(placement).sentences == [
            "keep prefill-0, decode-0",
            "drain and remove decode-1",
            "start wide, tp 2, pp 1",
        ]
        await town.operations.apply(placement, 1.0)
        assert town.names == ["prefill-0", "decode-0", "wide"]
        assert {name: town.epoch(name) for name in kept} == kept
        assert town.stage.supervisor.wards["wide"].is_ready
        assert town.operations.change_to(placement).sentences == ["keep prefill-0, decode-0, wide"]


def replanned(town: Town) -> Placement:
    """`wide` is added on free devices, and `late` on those of decode-1, which it replaces."""
    prefill, decode, replaced = town.stage.configs.placement.instances
    segment = msgspec.structs.replace(decode.segments[0], devices=(3, 4))
    wide = InstanceSpec("wide", Role.DECODE, Parallelism(2, 1), (segment,))
    late = msgspec.structs.replace(replaced, name="late")
    return Placement(version=1, instances=(prefill, decode, wide, late))


async def test_a_placement_of_which_the_last_part_cannot_be_started_is_undone(
    make_stage: MakeStage,
) -> None:
    """What had been added, and the want of what had been let go, once stayed."""
    async with town_of(make_stage, prefill=1, decode=2) as town:
        before = town.stage.configs.placement.instances
        kept = {name: town.epoch(name) for name in ("prefill-0", "decode-0")}
        town.hopeless = {"late"}
        why = "late could not be started: exit code 1; the former placement is back$"
        with pytest.raises(OperationRefused, match=why):
            await town.operations.apply(replanned(town), 1.0)
        assert town.names == ["prefill-0", "decode-0", "decode-1"]
        assert town.stage.configs.placement.instances == before
        assert {name: town.epoch(name) for name in kept} == kept
        assert all(ward.is_ready for ward in town.stage.supervisor.wards.values())


async def test_a_placement_of_which_the_first_part_cannot_be_started_touches_nothing(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, prefill=1, decode=2) as town:
        before = {name: town.epoch(name) for name in town.names}
        town.hopeless = {"wide"}
        with pytest.raises(OperationRefused, match="wide could not be started"):
            await town.operations.apply(replanned(town), 1.0)
        assert {name: town.epoch(name) for name in town.names} == before


async def test_an_old_instance_that_is_not_back_at_once_is_told_and_tried_again(
    make_stage: MakeStage,
) -> None:
    async with town_of(make_stage, prefill=1, decode=2) as town:
        town.hopeless = {"late", "decode-1"}
        with pytest.raises(OperationRefused, match="decode-1 is not back yet and is tried again"):
            await town.operations.apply(replanned(town), 1.0)
        town.hopeless = set()
        assert town.names == ["prefill-0", "decode-0", "decode-1"]
        while not town.stage.supervisor.wards["decode-1"].is_ready:
            await town.stage.supervisor.changed()


async def test_a_change_that_somebody_stops_half_way_says_what_stands_if_it_cannot_be_undone(
    make_stage: MakeStage,
) -> None:
    """`wide` has work when it is to go again, and is taken back while it drains for that."""
    async with town_of(make_stage, prefill=1, decode=2) as town:
        controller = town.stage.controller
        town.hopeless = {"late"}
        applying = asyncio.ensure_future(town.operations.apply(replanned(town), 60.0))
        while (wide := controller.instances.get("wide")) is None:
            await town.stage.supervisor.changed()
        wide.sequences[1] = 1
        for _ in range(1000):  # turns of the loop until it is to go again
            if not wide.is_draining:
                await asyncio.sleep(0)
        controller.undrain_instance("wide")
        with pytest.raises(OperationRefused, match="not be restored: wide was taken back") as told:
            await applying
        assert str(told.value).endswith("there are now: prefill-0, decode-0, wide")
        assert town.names == ["prefill-0", "decode-0", "wide"]


async def test_a_placement_that_nobody_could_decode_in_is_refused(make_stage: MakeStage) -> None:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        placement = Placement(version=1, instances=town.stage.configs.placement.instances[:1])
        with pytest.raises(OperationRefused, match="nobody would be left to decode"):
            await town.operations.apply(placement, 1.0)
        assert town.names == ["prefill-0", "decode-0"]


async def test_a_removal_cuts_the_wait_between_two_lives_short(make_stage: MakeStage) -> None:
    async with town_of(make_stage, prefill=1, decode=2) as town:
        town.may_be_ready = False
        town.stage.processes[-1].end("killed by SIGKILL")
        ward = town.stage.supervisor.wards["decode-1"]
        while ward.restarts < 3:  # the next wait is two seconds long
            await town.stage.supervisor.changed()
        async with asyncio.timeout(1.0):
            await town.operations.remove("decode-1", 1.0)
        assert town.names == ["prefill-0", "decode-0"]
