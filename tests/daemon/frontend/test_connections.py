"""Connections: how many, what may be sent ahead on one, and who is told when one ends."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from daemon.connection_book import Connection, ConnectionBook
from daemon.frontend.bodies import Limits
from daemon.generation import Delta
from daemon.guarded_protocol import MAX_AHEAD, Guards
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.frontend.raw_http import HEALTH, answer_to, post, wire_to

BODY = json.dumps(HELLO).encode()
STREAM = json.dumps(HELLO | {"stream": True}).encode()
END = [Delta(0, "end", (2,), None, FinishReason.LENGTH)]


class WatchedBook(ConnectionBook):
    """Tells when a connection has ended."""

    def __init__(self, max_total: int, max_per_peer: int) -> None:
        super().__init__(max_total, max_per_peer)
        self.has_released = asyncio.Event()

    def release(self, connection: Connection) -> None:
        super().release(connection)
        self.has_released.set()


async def test_a_connection_too_many_is_told_to_come_back(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, reply=REPLY, limits=Limits())
    service.book = ConnectionBook(2, 2)
    async with service.running(), AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(wire_to(service.port))
        answer = await answer_to(service.port, b"")
        assert (answer.status, answer.code) == (503, "too_many_connections")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("2", "close")


async def test_a_connection_that_rests_makes_room_for_a_new_one(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, reply=REPLY, limits=Limits())
    service.book = ConnectionBook(1, 2)
    async with service.running(), wire_to(service.port) as resting:
        await resting.send(HEALTH)
        await resting.answer()
        assert (await answer_to(service.port, HEALTH)).status == 200
        assert await resting.rest() == b""


async def test_a_crowd_leaves_the_house_as_it_was(service: Service) -> None:
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wire_to(service.port)) for _ in range(100)]
        await asyncio.gather(*(wire.send(HEALTH) for wire in wires))
        assert {(await wire.answer()).status for wire in wires} == {200}
        assert service.book.num_open == 100
    await until_nobody_is_connected(service)


async def until_nobody_is_connected(service: Service) -> None:
    """Answers on a new connection come after the news of those that ended before."""
    for _ in range(100):
        assert (await answer_to(service.port, HEALTH)).status == 200
        if service.book.num_open <= 1:
            return
    raise AssertionError("connections that have ended are still counted")


async def test_requests_sent_ahead_are_answered_in_their_order(service: Service) -> None:
    async with wire_to(service.port) as wire:
        for size in (1, 2, 3):
            body = json.dumps(HELLO | {"max_tokens": size}).encode()
            await wire.send(post(COMPLETIONS, body))
        await wire.send(HEALTH)
        answers = [json.loads((await wire.answer()).body) for _ in range(4)]
        assert [answer["usage"]["completion_tokens"] for answer in answers[:3]] == [1, 2, 3]
        assert answers[3] == {"status": "alive"}


async def test_what_follows_a_request_cannot_spoil_its_answer_and_is_told_after_it(
    service: Service,
) -> None:
    """An error in the middle of a stream would be read as a part of it."""
    go_on = asyncio.Event()
    service.submitter.script = lambda _: [[Delta(0, "a", (1,))], go_on, END]
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, STREAM) + b"no HTTP at all\r\n\r\n")
        await service.submitter.submitted.wait()
        go_on.set()
        answer = await wire.answer()
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert (await wire.answer()).status == 400
        assert await wire.rest() == b""


@pytest.mark.parametrize(
    "more",
    [HEALTH * (MAX_AHEAD + 2), HEALTH * 5000, post(COMPLETIONS, b"x" * 1_000_000)],
    ids=["more than may be", "thousands", "a megabyte"],
)
async def test_what_is_sent_too_far_ahead_is_not_read_and_what_was_due_is_answered_E25(
    service: Service, more: bytes
) -> None:
    go_on = asyncio.Event()
    service.submitter.script = lambda _: [go_on, END]
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, BODY))
        await service.submitter.submitted.wait()
        sending = asyncio.create_task(wire.send(more))
        while not service.refusals:
            await asyncio.wait_for(answer_to(service.port, HEALTH), 10)
        go_on.set()
        statuses = [(await wire.answer()).status]
        while not wire.reader.at_eof():
            try:
                statuses.append((await wire.answer()).status)
            except (EOFError, asyncio.IncompleteReadError):
                break
        *due, last = statuses
        assert set(due) == {200}
        assert len(due) <= 1 + MAX_AHEAD
        assert last == 400  # why the connection ends
        await sending
    assert len(service.submitter.generations) == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_client_that_leaves_with_requests_sent_ahead_aborts_the_first_F14(
    service: Service, body: bytes
) -> None:
    service.submitter.script = lambda _: [asyncio.Event()]
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, body) + post(COMPLETIONS, body) + HEALTH)
        await service.submitter.submitted.wait()
    await service.submitter.last.left.wait()
    assert service.submitter.last.is_aborted
    assert len(service.submitter.generations) == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_client_that_ends_its_side_has_left_F14(service: Service, body: bytes) -> None:
    """A half-closed connection looks like one whose client is gone; nothing is computed for it."""
    service.submitter.script = lambda _: [asyncio.Event()]
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, body))
        await service.submitter.submitted.wait()
        wire.writer.write_eof()
        await service.submitter.last.left.wait()
        assert await wire.rest() == b""
    assert service.submitter.last.is_aborted


async def test_a_connection_ends_when_its_client_wants_it_to(service: Service) -> None:
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, BODY, "connection: close") + HEALTH)
        assert (await wire.answer()).headers["connection"] == "close"
        assert await wire.rest() == b""


@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
async def test_an_answer_that_nobody_reads_is_not_kept_for_ever(
    tokenizer: Tokenizer, header: str
) -> None:
    service = Service(tokenizer, reply=REPLY, limits=Limits())
    service.book = book = WatchedBook(10, 10)
    service.guards, service.idle_s = Guards(flush_s=0.2), 0.2
    service.submitter.script = lambda _: [
        [Delta(0, "x" * 30_000_000, (1,), None, FinishReason.LENGTH)]
    ]
    async with service.running(), wire_to(service.port) as wire:
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wire.send(post(COMPLETIONS, BODY, header))
        await book.has_released.wait()
    assert book.num_open == 0


@pytest.mark.parametrize("is_behind", [False, True], ids=["its own", "the one before"])
async def test_a_client_that_does_not_read_an_answer_to_its_end_loses_its_connection(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, is_behind: bool
) -> None:
    """It once kept its place as long as it liked, and a request sent ahead waited behind it."""
    service = Service(tokenizer, reply=REPLY, limits=Limits(stall_s=0.2))
    service.book = book = WatchedBook(10, 10)
    service.guards = Guards(flush_s=0.2)
    long, ends = [Delta(0, "x" * 10_000_000, (1,))], [END] if is_behind else []
    service.submitter.script = lambda _: [long, long, long, *ends]
    async with service.running(), wire_to(service.port) as wire:
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wire.send(post(COMPLETIONS, BODY if is_behind else STREAM))
        await wire.send(post(COMPLETIONS, STREAM))
        await book.has_released.wait()
    assert book.num_open == 0
    assert len(service.submitter.generations) == 1 + is_behind
    assert not caplog.messages


async def test_what_waits_behind_an_answer_that_nobody_reads_does_not_wait_for_ever(
    tokenizer: Tokenizer,
) -> None:
    """Such as an answer to a question about health, which has no bound of its own."""
    service = Service(tokenizer, reply=REPLY, limits=Limits())
    service.book = book = WatchedBook(10, 10)
    service.guards = Guards(unread_s=0.2)
    long = [Delta(0, "x" * 10_000_000, (1,), None, FinishReason.LENGTH)]
    service.submitter.script = lambda _: [long]
    async with service.running(), wire_to(service.port) as wire:
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wire.send(post(COMPLETIONS, BODY) + HEALTH)
        await book.has_released.wait()
    assert book.num_open == 0
