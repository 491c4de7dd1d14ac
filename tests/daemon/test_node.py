"""What the node says of itself to balancers, consoles and systemd."""

import pytest

from daemon.admin_console import RefusedByState
from daemon.admin_views import NodeState
from daemon.errors import Draining, NotReady
from daemon.node import Node
from ipc.messages import Stats
from tests.daemon.stage import MakeStage, Stage


def node_of(stage: Stage) -> Node:
    return Node("tiny", "1.0", stage.controller, stage.supervisor)


async def test_a_node_starts_becomes_ready_and_is_degraded_by_a_death(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage()
    node = node_of(stage)
    assert node.state is NodeState.STARTING
    assert type(node.refusal) is NotReady
    keeping = stage.keep()
    first = await stage.ready()
    # Nobody asks for the state while it is ready: it must not depend on being looked at.
    first.end("exit code 1")
    second = await stage.started.get()
    assert node.state is NodeState.DEGRADED
    assert node.refusal is not None
    second.kill()
    await stage.supervisor.stop()
    await keeping


async def test_the_status_tells_what_leader_and_supervisor_last_said(make_stage: MakeStage) -> None:
    stage = await make_stage()
    node = node_of(stage)
    (before,) = node.status().instances
    assert (before.pid, before.blocks.total, before.running) == (None, 0, 0)
    keeping = stage.keep()
    process = await stage.ready()
    stats = Stats(num_running=3, blocks_total=8, blocks_free=5, blocks_in_use=3)
    stage.controller.on_event("mixed-0", process.config.epoch, stats)
    (told,) = node.status().instances
    assert (told.pid, told.kernels, told.running) == (process.pid, "played", 3)
    assert (told.blocks.total, told.blocks.free, told.blocks.in_use) == (8, 5, 3)
    assert node.state is NodeState.READY
    process.kill()
    await stage.supervisor.stop()
    await keeping


async def test_a_drained_node_refuses_until_it_is_undrained(make_stage: MakeStage) -> None:
    node = node_of(await make_stage())
    with pytest.raises(RefusedByState):
        node.undrain()
    await node.drain(deadline_s=1.0)
    assert node.state is NodeState.DRAINING
    assert isinstance(node.refusal, Draining)
    node.undrain()
    assert not isinstance(node.refusal, Draining)
