"""What is not HTTP as it should be: refused in the API's shape, and the connection ended."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from daemon.frontend.bodies import Limits
from daemon.guarded_protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    Guards,
)
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.frontend.raw_http import HEALTH, answer_to, post, wire_to

BODY = json.dumps(HELLO).encode()
GET = b"GET /health/live HTTP/1.1\r\n"
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\n".encode()
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def hasty(tokenizer: Tokenizer) -> AsyncIterator[Service]:
    """A service without patience."""
    limits = Limits(max_body_bytes=20_000, body_s=0.2, min_body_bytes_per_s=1_000_000)
    service = Service(tokenizer, reply=REPLY, limits=limits)
    service.guards = Guards(head_s=0.2, linger_s=0.2, on_refused=service.refusals.append)
    async with service.running():
        yield service


MALFORMED = {
    "no host": GET + b"\r\n",
    "two hosts": GET + b"host: a\r\nhost: b\r\n\r\n",
    "length and coding": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    "coding and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
    "negative length": POST + b"content-length: -1\r\n\r\n",
    "endless length": POST + b"content-length: " + b"9" * 30 + b"\r\n\r\n",
    "another coding": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
    "a coding of HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0"),
    "a size that is none": CHUNKED + b"zz\r\n",
    "a huge size": CHUNKED + b"f" * 17 + b"\r\n",
    "a chunk without its end": CHUNKED + b"1\r\nabc",
    "bare line feeds": b"GET / HTTP/1.1\nhost: a\n\n",
    "a folded header": GET + b"host: a\r\n b\r\n\r\n",
    "a space before the colon": GET + b"host : a\r\n\r\n",
    "a null": GET + b"host: a\0\r\n\r\n",
    "another version": HEALTH.replace(b"1.1", b"2.0"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "a tunnel": b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a path that is none": b"GET /\xc3\xa9 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a URL without a path": b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n",
    "an endless trailer": CHUNKED + b"0\r\nx: " + b"y" * 1_000_000,
    "an endless extension": CHUNKED + b"1;x=" + b"y" * 1_000_000,
}
TOO_LONG = {
    "a URL": b"GET /" + b"x" * MAX_URL_BYTES + b" HTTP/1.1\r\nhost: a\r\n\r\n",
}
TOO_LARGE = {
    "many headers": HEALTH[:-2] + b"x: y\r\n" * MAX_HEADERS + b"\r\n",
    "a long header": HEALTH[:-2] + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
    "an endless header": HEALTH[:-2] + b"x: " + b"y" * 1_000_000,
    "an endless name": HEALTH[:-2] + b"y" * 1_000_000,
    "endless blank lines": b"\r\n" * 100_000,
}
REFUSED = {
    **{name: (data, 400, "malformed_http") for name, data in MALFORMED.items()},
    **{name: (data, 414, "url_too_long") for name, data in TOO_LONG.items()},
    **{name: (data, 431, "head_too_large") for name, data in TOO_LARGE.items()},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_request_is_refused_and_its_connection_closed_E25(
    service: Service, name: str
) -> None:
    data, status, code = REFUSED[name]
    async with wire_to(service.port) as wire:
        await wire.send(data)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (status, code)
        assert answer.headers["connection"] == "close"
        assert await wire.rest() == b""
    assert (await answer_to(service.port, HEALTH)).status == 200
    assert service.submitter.generations == []


async def test_a_head_at_its_limits_is_read(service: Service) -> None:
    few = HEALTH[:-2] + b"x: y\r\n" * (MAX_HEADERS - 1) + b"\r\n"
    wide = HEALTH[:-2] + b"x: " + b"y" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
    for data in (few, wide):
        assert (await answer_to(service.port, data)).status == 200


async def test_refusals_are_counted_by_their_kind(hasty: Service) -> None:
    for name in ("no host", "a URL", "many headers"):
        await answer_to(hasty.port, REFUSED[name][0])
    codes = [refusal.code for refusal in hasty.refusals]
    assert codes == ["malformed_http", "url_too_long", "head_too_large"]


@pytest.mark.parametrize("beginning", [b"G", GET, GET + b"host: a\r\n", GET + b"x: "])
async def test_a_head_that_does_not_come_to_its_end_is_refused_in_time_E25(
    hasty: Service, beginning: bytes
) -> None:
    async with wire_to(hasty.port) as wire:
        await wire.send(beginning)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await wire.rest() == b""


async def test_a_head_that_trickles_in_is_no_excuse_E25(hasty: Service) -> None:
    async with wire_to(hasty.port) as wire:
        await wire.send(GET)

        async def trickle() -> None:
            for count in range(1_000):
                await wire.send(b"x-%d: y\r\n" % count)
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert (await wire.answer()).status == 408
        trickling.cancel()


async def test_a_connection_that_says_nothing_is_closed_without_a_word_E25(hasty: Service) -> None:
    async with wire_to(hasty.port) as wire:
        assert await wire.rest() == b""
    assert hasty.refusals == []


async def test_a_connection_that_rests_is_closed_in_the_end(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, reply=REPLY, limits=Limits())
    service.idle_s = 0.1
    async with service.running(), wire_to(service.port) as wire:
        await wire.send(HEALTH)
        assert (await wire.answer()).status == 200
        assert await wire.rest() == b""


@pytest.mark.parametrize("head", [CHUNKED + b"5\r\nab", POST + b"content-length: 100\r\n\r\n{"])
async def test_a_body_that_does_not_come_to_its_end_is_refused_in_time_E25(
    hasty: Service, head: bytes
) -> None:
    async with wire_to(hasty.port) as wire:
        await wire.send(head)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await wire.rest() == b""


async def test_a_slow_answer_is_not_the_clients_fault(hasty: Service) -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, late.set)
    hasty.submitter.script = lambda _: [late]
    assert (await answer_to(hasty.port, post(COMPLETIONS, BODY))).status == 200


async def test_a_body_that_was_refused_is_not_taken_for_a_request(service: Service) -> None:
    """What is behind a body that nobody reads must not be obeyed."""
    smuggled = post(COMPLETIONS, BODY)
    async with wire_to(service.port) as wire:
        await wire.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\n".encode())
        await wire.send(b"content-length: 1000000\r\n\r\n" + smuggled)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert await wire.rest() == b""
    assert service.submitter.generations == []


async def test_a_refused_body_that_is_still_sent_does_not_lose_its_answer(service: Service) -> None:
    """Closing at once would reset the connection, and many clients read only after they sent."""
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, b"x" * 3_000_000))
        assert (await wire.answer()).status == 413


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_a_wish_to_upgrade_is_not_heard(service: Service, protocol: str) -> None:
    """Java's client wishes for HTTP/2 with its first request, and has sent its body with it."""
    wish = (f"upgrade: {protocol}", "connection: Upgrade, HTTP2-Settings", "http2-settings: AAM")
    async with wire_to(service.port) as wire:
        for data in (post(COMPLETIONS, BODY, *wish), HEALTH):
            await wire.send(data)
            assert (await wire.answer()).status == 200
    assert len(service.submitter.generations) == 1


async def test_a_wish_to_upgrade_may_come_in_pieces(service: Service) -> None:
    data = post(COMPLETIONS, BODY, "upgrade: h2c", "connection: upgrade, close")
    async with wire_to(service.port) as wire:
        for at in range(0, len(data), 50):
            await wire.send(data[at : at + 50])
            await asyncio.sleep(0)
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_a_body_may_wait_to_be_asked_for(service: Service) -> None:
    async with wire_to(service.port) as wire:
        head, body = post(COMPLETIONS, BODY, "expect: 100-continue").split(b"\r\n\r\n", 1)
        await wire.send(head + b"\r\n\r\n")
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)
        assert (await wire.answer()).status == 200


async def test_trailers_are_no_headers(service: Service) -> None:
    size = b"%x\r\n" % len(BODY)
    data = CHUNKED + size + BODY + b"\r\n0\r\nx-request-id: trailed\r\n\r\n"
    answer = await answer_to(service.port, data + HEALTH)
    assert (answer.status, len(answer.headers["x-request-id"])) == (200, 32)
