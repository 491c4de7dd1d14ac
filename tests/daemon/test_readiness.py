"""Ready is progress: somebody gets on in each phase, by the watchdog's own findings."""

import asyncio
from typing import cast

import pytest

from daemon.errors import Draining
from daemon.frontend.app import Progress
from daemon.instances import Instance
from daemon.node import Node
from daemon.readiness import NodeReadiness
from daemon.text import Tokenizer
from ipc.vocabulary import Role
from tests.daemon.metric_samples import spec_of
from tests.daemon.mute import LAYOUT, MuteHouse
from tests.daemon.small_tokenizers import byte_level_directory, load


class StillBeat:
    """Says for how long each instance has got nowhere."""

    def __init__(self, **still_s: float) -> None:
        self.still_s = still_s


class NodeThat:
    """Refuses, or does not."""

    refusal: Draining | None = None


@pytest.fixture
def house(tmp_path_factory: pytest.TempPathFactory) -> MuteHouse:
    tokenizer: Tokenizer = load(byte_level_directory(tmp_path_factory.mktemp("m") / "model"))

    async def made() -> MuteHouse:
        return MuteHouse(tokenizer)

    return asyncio.run(made())


def readiness(house: MuteHouse, beat: StillBeat, node: NodeThat | None = None) -> Progress:
    table = house.controller.instances
    return NodeReadiness(cast(Node, node or NodeThat()), table, beat, wedged_after_s=10.0)


def test_a_node_that_moves_is_ready(house: MuteHouse) -> None:
    assert readiness(house, StillBeat(p0=4.9, d0=0.0)).standstill is None
    assert readiness(house, StillBeat()).standstill is None


@pytest.mark.parametrize(("name", "does"), [("p0", "prefills"), ("d0", "decodes")])
def test_a_node_is_not_ready_when_nobody_of_a_phase_gets_on_D2(
    house: MuteHouse, name: str, does: str
) -> None:
    ready = readiness(house, StillBeat(**{name: 5.0}))
    assert ready.refusal is None
    assert ready.standstill is not None
    assert f"nobody who {does} has made progress" in ready.standstill.message


def test_one_that_gets_on_is_enough_for_its_phase(house: MuteHouse) -> None:
    house.controller.instance_up(Instance(spec_of("d1", Role.DECODE), 2, LAYOUT, lambda _: None))
    assert readiness(house, StillBeat(d0=9.0)).standstill is None


def test_what_is_not_healthy_is_not_ready_either_D4(house: MuteHouse) -> None:
    node = NodeThat()
    node.refusal = Draining()
    assert readiness(house, StillBeat(), node).standstill is node.refusal
