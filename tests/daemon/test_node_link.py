"""The link between nodes: workers of another node, silence on either side, and who is let in."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from daemon.link_terms import Terms
from daemon.node_messages import Join, Joined, Kill, Ping, Pong, Spawn, Started, Tell
from daemon.remote_node import RemoteWorker
from ipc.channel import PoolDescriptor
from ipc.curve import CurveKeys, new_keys
from ipc.messages import Broken, Exit, Hello, PeerUp, Ready
from ipc.sockets import PeerGone
from ipc.vocabulary import WorkerName
from tests.daemon.stage import PlayedProcess, layout_of
from tests.daemon.two_nodes import (
    KEYS,
    PATIENCE_S,
    SILENCE_S,
    TERMS,
    BareHome,
    Home,
    Host,
    contexts,
    worker_config,
)

ONE, OTHER = WorkerName("m", 1, 0), WorkerName("d", 1, 0)


class Nodes:
    def __init__(self, home: zmq.asyncio.Context, host: Host) -> None:
        self.context, self.host = home, host
        self._homes: list[Home] = []
        self._bares: list[BareHome] = []

    def home(self, **how: Any) -> Home:
        self._homes.append(Home(self.context, self.host.address, **how))
        return self._homes[-1]

    def bare(self, keys: CurveKeys | None = KEYS) -> BareHome:
        self._bares.append(BareHome(self.context, self.host.address, keys))
        return self._bares[-1]

    async def close(self) -> None:
        for home in self._homes:
            await home.close()
        for bare in self._bares:
            bare.socket.close()
        await self.host.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with contexts() as (home, host):
        both = Nodes(home, Host(host, tmp_path))
        yield both
        await both.close()


async def started(nodes: Nodes, home: Home, name: WorkerName) -> tuple[RemoteWorker, PlayedProcess]:
    """A worker, as home sees it and as it is."""
    worker = await (await home.joined()).start(worker_config(name))
    return worker, await nodes.host.started.get()


async def until_ended(worker: RemoteWorker | PlayedProcess) -> str:
    return await asyncio.wait_for(worker.ended(), PATIENCE_S)


async def test_a_worker_of_another_node_is_started_heard_and_reaped(nodes: Nodes) -> None:
    home = nodes.home()
    worker, process = await started(nodes, home, ONE)
    assert worker.pid == process.pid
    assert (process.config.endpoint, process.config.model_dir) == (nodes.host.link.endpoint, "here")
    sender = (ONE, process.config.epoch)
    assert nodes.host.segments.hosts(sender)
    nodes.host.segments.on_event(sender, Hello(ONE, process.pid))
    nodes.host.say_ready(process)
    assert await home.heard.get() == (*sender, Hello(ONE, process.pid))
    assert isinstance((await home.heard.get())[2], Ready)
    assert process.pool_descriptor is not None
    worker.kill()
    assert await until_ended(worker) == "killed by SIGKILL"
    assert not nodes.host.segments.hosts(sender)


async def test_how_a_worker_ended_there_is_told_here(nodes: Nodes) -> None:
    worker, process = await started(nodes, nodes.home(), ONE)
    process.end("exit code 3")
    assert await until_ended(worker) == "exit code 3"


async def test_a_pool_is_lent_to_a_worker_of_its_own_node_before_it_is_told(nodes: Nodes) -> None:
    home = nodes.home()
    _, owner = await started(nodes, home, ONE)
    worker, reader = await started(nodes, home, OTHER)
    nodes.host.say_ready(owner)
    await home.heard.get()
    about = PoolDescriptor(ONE, owner.config.epoch)
    worker.give_pool(about, None)
    worker.tell(PeerUp(ONE, owner.config.epoch, layout_of(owner.config)))
    worker.tell(Exit())
    worker.kill()
    await until_ended(worker)
    assert reader.given == [about]
    assert [type(command) for _, command in nodes.host.link.sent] == [PeerUp, Exit]


async def test_a_silent_home_loses_its_workers_within_the_bound(nodes: Nodes) -> None:
    """It answers with old news only, as a daemon's socket is full of when it was stopped."""
    bare = nodes.bare()
    await bare.say(TERMS.join("n0", SILENCE_S))
    await bare.hear(Joined)
    await bare.say(Spawn(worker_config(ONE)))
    process = await nodes.host.started.get()
    began_s = time.monotonic()
    await bare.hear(Ping)
    await bare.say(Pong(began_s - 2 * SILENCE_S))
    assert await until_ended(process) == "killed by SIGKILL"
    assert SILENCE_S * 0.8 < time.monotonic() - began_s < SILENCE_S + 1.5
    assert await bare.evicted() == f"n0 was silent for {SILENCE_S:g} s"


async def test_a_home_that_answers_keeps_its_workers(nodes: Nodes) -> None:
    _, process = await started(nodes, nodes.home(), ONE)
    await asyncio.sleep(2 * SILENCE_S)
    assert not process.has_ended


async def test_workers_of_a_silent_node_have_ended_after_the_bound(nodes: Nodes) -> None:
    home = nodes.home()
    worker, _ = await started(nodes, home, ONE)
    nodes.host.serving.cancel()
    assert "lost with n1: nothing heard for" in await until_ended(worker)
    with pytest.raises(PeerGone, match="n1 is not joined"):
        worker.tell(Exit())
    with pytest.raises(OSError, match="n1 is not joined: nothing heard"):
        await home.node.start(worker_config(ONE))


async def test_a_home_that_leaves_takes_its_workers_along(nodes: Nodes) -> None:
    home = nodes.home(silence_s=60.0)
    _, process = await started(nodes, home, ONE)
    await home.close()
    assert await until_ended(process) == "killed by SIGKILL"


async def test_a_home_that_comes_again_finds_nothing_of_its_earlier_self(nodes: Nodes) -> None:
    bare = nodes.bare()
    await bare.say(TERMS.join("n0", 60.0))
    await bare.say(Spawn(worker_config(ONE)))
    process = await nodes.host.started.get()
    await nodes.home().joined()
    assert process.has_ended
    assert await bare.evicted() == "n0 joined again"


async def test_a_gap_in_the_stream_ends_the_session(nodes: Nodes) -> None:
    bare = nodes.bare()
    await bare.say(TERMS.join("n0", 60.0))
    await bare.say(Spawn(worker_config(ONE)))
    process = await nodes.host.started.get()
    bare.session.pack(Kill(ONE, 7))  # and lost
    await bare.say(Tell(ONE, 7, Exit()))
    assert "the link lost something: message 3 came where 2 was due" in await bare.evicted()
    assert process.has_ended


async def test_a_session_that_nobody_knows_is_told_so(nodes: Nodes) -> None:
    """As of a host that was started again."""
    bare = nodes.bare()
    await bare.say(Spawn(worker_config(ONE)))
    assert "knows no such session" in await bare.evicted()
    assert nodes.host.started.empty()


async def test_a_process_that_cannot_be_made_is_an_end_with_a_reason(nodes: Nodes) -> None:
    nodes.host.spawn_errors = [OSError(24, "Too many open files")]
    node = await nodes.home().joined()
    with pytest.raises(OSError, match=r"on n1: cannot be started: .*Too many open files"):
        await node.start(worker_config(ONE))


async def test_when_the_node_stops_its_homes_hear_of_every_end(nodes: Nodes) -> None:
    worker, process = await started(nodes, nodes.home(silence_s=60.0), ONE)
    await nodes.host.segments.stop()
    assert process.has_ended
    assert await until_ended(worker)


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (Terms("another", TERMS.model), "n0 has another placement file"),
        (Terms(TERMS.placement, "another"), "the model of n0 has another config.json"),
    ],
)
async def test_who_means_something_else_is_refused_with_the_reason(
    nodes: Nodes, terms: Terms, why: str
) -> None:
    bare = nodes.bare()
    await bare.say(terms.join("n0", 60.0))
    await bare.say(Spawn(worker_config(ONE)))
    assert "knows no such session" in await bare.evicted()
    home = nodes.home(terms=terms)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(home.node.until_joined(), 0.4)
    assert home.node.trouble == f"it refuses us: {why}"


def test_another_version_of_the_link_is_refused() -> None:
    join = Join(version=9, home="n0", silence_s=1, placement="placement", model="model")
    assert TERMS.objection(join) == "n0 speaks version 9 of the link, not 1"


@pytest.mark.parametrize("keys", [None, new_keys()], ids=["no key", "another key"])
async def test_a_stranger_is_not_let_in(nodes: Nodes, keys: CurveKeys | None) -> None:
    stranger = nodes.bare(keys)
    await stranger.say(TERMS.join("n0", 60.0))
    assert not await stranger.socket.poll(500)
    member = nodes.bare()
    await member.say(TERMS.join("n0", 60.0))
    assert isinstance(await member.hear(Joined), Joined)


async def test_a_false_host_learns_nothing(nodes: Nodes) -> None:
    """Who does not hold the secret cannot be called, whatever its address."""
    home = nodes.home(keys=new_keys())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(home.node.until_joined(), 0.5)


async def test_what_a_starting_worker_says_goes_home_and_nowhere_else(nodes: Nodes) -> None:
    bare = nodes.bare()
    await bare.say(TERMS.join("n9", 60.0))
    home = nodes.home()
    _, process = await started(nodes, home, ONE)
    nodes.host.segments.on_event((ONE, 8), Broken("of no epoch of ours"))
    nodes.host.segments.on_event((ONE, process.config.epoch), Broken("no such file"))
    assert await home.heard.get() == (ONE, process.config.epoch, Broken("no such file"))
    await bare.say(Spawn(worker_config(OTHER)))
    assert isinstance(await bare.hear(Started), Started)
