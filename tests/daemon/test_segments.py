"""Instances whose stages are on two nodes: one life, from the home's side."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon.config import DaemonConfig
from daemon.neighbours import Neighbours
from daemon.text import Tokenizer
from ipc.messages import Audit, PeerUp
from ipc.vocabulary import InstanceSpec, Parallelism, Placement, Role, Segment
from tests.daemon.small_tokenizers import byte_level_json
from tests.daemon.stage import OverheardLink, PlayedProcess, Stage
from tests.daemon.two_nodes import PATIENCE_S, Home, Host, contexts


def spec(name: str, role: Role, device: int) -> InstanceSpec:
    return InstanceSpec(
        name, role, Parallelism(1, 2), (Segment("n0", (device,)), Segment("n1", (device,)))
    )


PLACEMENT = Placement(1, (spec("p", Role.PREFILL, 0), spec("d", Role.DECODE, 1)))


class TwoNodes:
    """A stage as the home, and the node that hosts the second halves of its instances."""

    def __init__(self, stage: Stage, home: Home, host: Host) -> None:
        self.stage, self.home, self.host = stage, home, host
        self.keeping = stage.keep_all()

    async def started(self) -> dict[str, PlayedProcess]:
        """The next two processes of each node."""
        async with asyncio.timeout(PATIENCE_S):
            queues = (self.stage.started, self.host.started) * 2
            processes = [await queue.get() for queue in queues]
        return {str(process.config.name): process for process in processes}

    async def ready(self) -> dict[str, PlayedProcess]:
        processes = await self.started()
        for process in processes.values():
            if process.config.name.stage == 0:
                self.stage.say_ready(process)
            else:
                self.host.say_ready(process)
        wards = self.stage.supervisor.wards.values()
        async with asyncio.timeout(PATIENCE_S):
            await self.stage.until(lambda: all(ward.is_ready for ward in wards))
        return processes

    async def end(self) -> None:
        for ward in self.stage.supervisor.wards.values():
            for process in ward.life.workers.values() if ward.life else ():
                process.kill()
        await self.stage.supervisor.stop()
        await asyncio.wait_for(self.keeping, PATIENCE_S)
        await self.home.close()
        await self.host.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[TwoNodes]:
    (tmp_path / "tokenizer.json").write_text(byte_level_json())
    (tmp_path / "config.json").write_text("{}")
    async with contexts() as (context, far_context):
        host = Host(far_context, tmp_path)
        home = Home(context, host.address, on_event=lambda *said: stage.supervisor.on_event(*said))
        link = OverheardLink(context, f"ipc://{tmp_path}/home")
        tokenizer = Tokenizer.from_directory(tmp_path)
        config = DaemonConfig(node="n0", prefill=0, decode=0)
        stage = Stage(link, tokenizer, config, PLACEMENT, Neighbours([home.node]))
        both = TwoNodes(stage, home, host)
        yield both
        await both.end()
        link.close()


async def test_each_stage_runs_on_its_node_and_the_leader_at_home(nodes: TwoNodes) -> None:
    processes = await nodes.ready()
    assert sorted(processes) == ["d/0.0", "d/1.0", "p/0.0", "p/1.0"]
    assert nodes.stage.controller.instances.can_serve
    near, far = processes["d/0.0"].config, processes["d/1.0"].config
    assert (near.epoch, near.group_endpoint, near.rendezvous) == (
        far.epoch,
        far.group_endpoint,
        far.rendezvous,
    )
    assert near.group_endpoint.startswith("tcp://127.0.0.1:")
    assert near.rendezvous.startswith("tcp://127.0.0.1:")
    assert near.rendezvous != near.group_endpoint
    assert near.group_secret
    assert (far.group_public, far.group_secret) == (near.group_public, "")


async def test_pools_are_introduced_within_each_node_and_never_across(nodes: TwoNodes) -> None:
    processes = await nodes.ready()
    await asyncio.wait_for(nodes.host.link.has_sent.wait(), PATIENCE_S)
    given = {name: [str(pool.worker) for pool in p.given] for name, p in processes.items()}
    assert given == {"p/0.0": [], "p/1.0": [], "d/0.0": ["p/0.0"], "d/1.0": ["p/1.0"]}
    for link, stage in ((nodes.stage.link, 0), (nodes.host.link, 1)):
        told = [(str(n), str(c.worker)) for n, c in link.sent if isinstance(c, PeerUp)]
        assert told == [(f"d/{stage}.0", f"p/{stage}.0")]


async def test_only_workers_of_this_node_are_asked_for_signs_of_life(nodes: TwoNodes) -> None:
    """Those of the other one hang with their leader; a beat must not go astray to them."""
    await nodes.ready()
    stage = nodes.stage
    for life in stage.supervisor.watched_lives():
        life.ask(1)
    asked = sorted(str(n) for n, command in stage.link.sent if isinstance(command, Audit))
    assert asked == ["d/0.0", "p/0.0"]


async def test_a_rank_that_ends_there_ends_the_instance_on_both_nodes(nodes: TwoNodes) -> None:
    processes = await nodes.ready()
    processes["d/1.0"].end("killed by SIGSEGV")
    again = [await nodes.stage.started.get(), await nodes.host.started.get()]
    assert [str(process.config.name) for process in again] == ["d/0.0", "d/1.0"]
    assert processes["d/0.0"].has_ended
    assert not processes["p/0.0"].has_ended
    ward = nodes.stage.supervisor.wards["d"]
    assert (ward.restarts, ward.last_exit) == (1, "d/1.0 killed by SIGSEGV")


async def test_a_rank_that_ends_here_is_reaped_there_before_the_next_epoch(nodes: TwoNodes) -> None:
    processes = await nodes.ready()
    processes["p/0.0"].end("exit code 70")
    again = await nodes.stage.started.get()
    assert processes["p/1.0"].has_ended
    assert again.config.epoch != processes["p/0.0"].config.epoch


async def test_a_node_that_falls_silent_takes_its_instances_down_until_it_joins_again(
    nodes: TwoNodes,
) -> None:
    processes = await nodes.ready()
    nodes.host.serving.cancel()
    async with asyncio.timeout(PATIENCE_S):
        for name in ("p/0.0", "d/0.0"):
            await processes[name].ended()
        wards = nodes.stage.supervisor.wards.values()
        await nodes.stage.until(lambda: all("not joined" in ward.state for ward in wards))
    assert not nodes.stage.controller.instances.can_serve
    assert all("lost with n1: nothing heard for" in (ward.last_exit or "") for ward in wards)
    nodes.host.serve()
    await nodes.ready()
    assert nodes.stage.controller.instances.can_serve


async def test_an_instance_waits_for_its_node_and_can_be_stopped_meanwhile(nodes: TwoNodes) -> None:
    await nodes.started()
    await nodes.host.segments.stop()
    nodes.host.serving.cancel()
    wards = nodes.stage.supervisor.wards.values()
    async with asyncio.timeout(PATIENCE_S):
        await nodes.stage.until(lambda: all("n1 is not joined" in ward.state for ward in wards))
