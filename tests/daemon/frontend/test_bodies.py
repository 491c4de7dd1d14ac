"""Bodies on their way in: whatever they are, they are answered, and others are not held up."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from daemon.frontend.bodies import Limits
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, REPLY, answer, error_of
from tests.daemon.frontend.http_service import Service
from tests.daemon.frontend.nasty_bodies import CHAT_KINDS, nasty_bodies
from tests.daemon.frontend.raw_http import answer_to, post, wire_to

BODY = json.dumps(HELLO).encode()
NASTY = nasty_bodies(300_000)


@pytest.fixture
async def service(tokenizer: Tokenizer) -> AsyncIterator[Service]:
    limits = Limits(max_body_bytes=1_000_000, max_bodies_bytes=2_000_000)
    async with Service(tokenizer, reply=REPLY, limits=limits).running() as service:
        yield service


@pytest.mark.parametrize("kind", NASTY)
async def test_the_worst_body_of_a_kind_is_refused_or_read_and_never_a_failure_D5_E25(
    http: httpx.AsyncClient, kind: str
) -> None:
    path = CHAT if kind in CHAT_KINDS else COMPLETIONS
    response = await http.post(path, content=NASTY[kind])
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert len(error_of(response)["message"]) < 400


def threads_for_large_things() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("large")}


async def test_large_bodies_alone_are_read_in_the_thread_for_them_D5(
    http: httpx.AsyncClient,
) -> None:
    before = threads_for_large_things()
    await answer(http, COMPLETIONS, HELLO)
    assert threads_for_large_things() <= before
    for _ in range(3):
        await http.post(COMPLETIONS, content=NASTY["most texts"])
    assert len(threads_for_large_things() - before) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_long_prompts_alone_are_told_in_the_thread_for_large_things(
    http: httpx.AsyncClient, stream: bool
) -> None:
    """Those of 8,000 tokens took seconds, and every stream stood still meanwhile."""
    body = HELLO | {"echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
    before = threads_for_large_things()
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    assert threads_for_large_things() <= before
    response = await http.post(COMPLETIONS, json=body | {"prompt": [70] * 200})
    assert response.text.count("top_logprobs") == 1
    assert len(threads_for_large_things() - before) == 1


async def test_a_large_body_that_fits_is_answered(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"metadata": {"a": "x" * 500_000}})
    assert content["choices"][0]["text"] == REPLY


async def test_bodies_are_bounded_all_together(service: Service) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: 999999\r\n\r\n".encode()
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wire_to(service.port)) for _ in range(3)]
        for wire in wires:
            await wire.send(head + b"x" * 900_000)
        done = [asyncio.create_task(wire.answer()) for wire in wires]
        finished, waiting = await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
        refused = finished.pop().result()
        assert (refused.status, refused.code) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        for task in waiting:
            task.cancel()
    await answered_in_the_end(service)


async def answered_in_the_end(service: Service) -> None:
    """The room of bodies whose clients have left is free again."""
    large = json.dumps(HELLO | {"metadata": {"a": "x" * 900_000}}).encode()
    for _ in range(100):
        if (await answer_to(service.port, post(COMPLETIONS, large))).status == 200:
            return
    raise AssertionError("the bytes of bodies that nobody sends any more are still counted")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_body_may_come_in_chunks_of_any_size_E25(service: Service, size: int) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    pieces = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    assert (await answer_to(service.port, head + chunks + b"0\r\n\r\n")).status == 200


async def test_a_body_in_chunks_has_as_long_as_one_whose_size_was_announced_E25(
    tokenizer: Tokenizer,
) -> None:
    """A flat time once cut off large ones that came steadily."""
    limits = Limits(body_s=0.05, min_body_bytes_per_s=10)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    content = json.dumps(HELLO | {"metadata": {"a": "x" * 1000}}).encode()
    async with (
        Service(tokenizer, reply=REPLY, limits=limits).running() as service,
        wire_to(service.port) as steady,
    ):
        await steady.send(head + b"%x\r\n%b\r\n" % (len(content) - 1, content[:-1]))
        silent = await answer_to(service.port, head)  # whose time is over before
        assert (silent.status, silent.code) == (408, "request_timeout")
        await steady.send(b"1\r\n%b\r\n0\r\n\r\n" % content[-1:])
        assert (await steady.answer()).status == 200
