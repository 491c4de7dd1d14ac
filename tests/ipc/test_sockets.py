"""The link: ordered, numbered, fenced by epoch; nobody speaks for a dead incarnation."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from ipc.codec import Kind, encode
from ipc.messages import Exit, Gone, Hello, Release, TokenRow, Tokens
from ipc.sockets import DaemonSocket, LinkBroken, PeerGone, WorkerSocket, identity
from ipc.vocabulary import WorkerName

WORKER = WorkerName("decode-0")


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[DaemonSocket]:
    context = zmq.asyncio.Context()
    socket = DaemonSocket(context, f"ipc://{tmp_path}/w.ipc")
    yield socket
    socket.close()
    context.term()


async def test_events_and_commands_arrive_in_order(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 5)
    worker = WorkerSocket(link.endpoint, WORKER, 5)
    tokens = Tokens(1.0, (TokenRow(1, (2,)),))
    worker.send(Hello(WORKER, 1))
    worker.send(tokens)
    events = link.receive()
    assert await anext(events) == ((WORKER, 5), Hello(WORKER, 1))
    assert await anext(events) == ((WORKER, 5), tokens)
    for request_id in range(3):
        link.send(WORKER, 5, Release(request_id))
    link.send(WORKER, 5, Exit())
    received = worker.receive(1.0)
    while len(received) < 4:
        received += worker.receive(1.0)
    assert received == [Release(0), Release(1), Release(2), Exit()]
    worker.close()


async def test_a_command_to_a_closed_epoch_is_refused(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 5)
    link.close_epoch(WORKER, 5)
    with pytest.raises(PeerGone, match="has no epoch 5"):
        link.send(WORKER, 5, Exit())


async def test_a_command_to_a_process_that_never_came_is_refused(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 5)
    with pytest.raises(PeerGone):
        link.send(WORKER, 5, Exit())


async def test_events_of_a_dead_epoch_are_dropped(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 6)
    old, new = (WorkerSocket(link.endpoint, WORKER, epoch) for epoch in (5, 6))
    old.send(Gone(1, (1,)))
    new.send(Hello(WORKER, 2))
    assert await anext(link.receive()) == ((WORKER, 6), Hello(WORKER, 2))
    old.close()
    new.close()


async def test_a_lost_message_ends_the_epoch(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.IDENTITY, identity(WORKER, 5))
        raw.connect(link.endpoint)
        raw.send_multipart(encode(Hello(WORKER, 1), Kind.EVENT, 5, 0))
        raw.send_multipart(encode(Hello(WORKER, 1), Kind.EVENT, 5, 2))
        events = link.receive()
        await anext(events)
        with pytest.raises(LinkBroken, match="message 2 came where 1 was due") as broken:
            await anext(events)
    assert broken.value.sender == (WORKER, 5)
    with pytest.raises(PeerGone):
        link.send(WORKER, 5, Exit())


async def test_garbage_from_a_stranger_is_ignored(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 5)
    worker = WorkerSocket(link.endpoint, WORKER, 5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(link.endpoint)
        raw.send_multipart([b"\x80\x04pickle", b"", b"x" * 1000])
        worker.send(Hello(WORKER, 1))
        assert await anext(link.receive()) == ((WORKER, 5), Hello(WORKER, 1))
    worker.close()


async def test_sending_never_swallows_the_sign_that_something_has_come(link: DaemonSocket) -> None:
    """A send through a shadow of the socket once did: the event lay unread until the next one."""
    link.open_epoch(WORKER, 5)
    worker = WorkerSocket(link.endpoint, WORKER, 5)
    worker.send(Hello(WORKER, 1))
    events = link.receive()
    await anext(events)
    for round_number in range(300):
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        worker.send(Gone(round_number, ()))
        for _ in range(3):
            link.send(WORKER, 5, Release(round_number))
        async with asyncio.timeout(5):
            assert await waiting == ((WORKER, 5), Gone(round_number, ()))
    worker.close()


async def test_what_comes_after_a_burst_is_waited_for_and_not_missed(link: DaemonSocket) -> None:
    link.open_epoch(WORKER, 5)
    worker = WorkerSocket(link.endpoint, WORKER, 5)
    events = link.receive()
    for burst in range(100):
        for number in range(burst % 7 + 1):
            worker.send(Gone(number, ()))
        async with asyncio.timeout(5):
            for number in range(burst % 7 + 1):
                assert await anext(events) == ((WORKER, 5), Gone(number, ()))
    worker.close()
