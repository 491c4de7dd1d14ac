"""With keys, a stranger learns nothing but that a key is needed; health is for everybody."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import httpx
import pytest

from daemon.api_keys import ApiKey, KeyRing
from daemon.frontend.app import build_app
from daemon.frontend.openapi import OPERATIONS
from daemon.generation import Delta
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason
from tests.daemon.frontend.http_calls import (
    COMPLETIONS,
    HELLO,
    LIMITS,
    REPLY,
    answer,
    error_of,
)
from tests.daemon.frontend.http_service import Service

SECRET = "sk-alice-0123456789"
GOOD = {"authorization": f"Bearer {SECRET}"}
CLOSED = [each.public_path for each in OPERATIONS if not each.path.startswith("/health")]
OPEN = [each.path for each in OPERATIONS if each.path.startswith("/health")]


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@pytest.fixture
async def keyed(tokenizer: Tokenizer) -> AsyncIterator[Service]:
    """A service for alice, who may have two requests, one of them without a token."""
    service = Service(tokenizer, reply=REPLY, limits=LIMITS)
    ring = KeyRing([ApiKey("alice", digest(SECRET), max_requests=2, max_queued=1)])
    service.app = build_app(
        service.submitter,
        service.model,
        service.readiness,
        lambda: ("text/plain", b"up 1\n"),
        LIMITS,
        keys=ring,
    )
    async with service.running():
        yield service


@pytest.fixture
async def http(keyed: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with keyed.client() as client:
        yield client


@pytest.mark.parametrize("path", [*CLOSED, "/", "/nothing", "/healthy", "/health/", "/health/x"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD"])
async def test_every_path_but_health_needs_a_key_and_none_is_betrayed(
    http: httpx.AsyncClient, path: str, method: str
) -> None:
    response = await http.request(method, path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert "tiny" not in response.text
    if method != "HEAD":
        error = error_of(response)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize("path", OPEN)
async def test_health_is_for_everybody(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {SECRET}",
        SECRET,
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        f"Bearer {digest(SECRET).hex()}",
    ],
)
async def test_a_wrong_key_is_refused_whatever_its_form(
    http: httpx.AsyncClient, value: str
) -> None:
    response = await http.get("/v1/models", headers={"authorization": value})
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")


async def test_a_browser_may_ask_before_it_sends_a_key_E17(http: httpx.AsyncClient) -> None:
    assert (await http.options(COMPLETIONS)).status_code == 204
    assert (await http.get(COMPLETIONS)).status_code == 401


async def test_of_two_keys_neither_is_taken(http: httpx.AsyncClient) -> None:
    headers = [("authorization", f"Bearer {SECRET}"), ("authorization", "Bearer other")]
    assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def test_bytes_that_are_no_text_are_no_key(http: httpx.AsyncClient) -> None:
    headers = {b"authorization": b"Bearer \xff\xfe\x80"}
    assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def test_with_its_key_a_client_gets_what_it_always_got(http: httpx.AsyncClient) -> None:
    http.headers.update(GOOD)
    assert (await http.get("/v1/models")).status_code == 200
    assert (await http.get("/nothing")).status_code == 404
    assert (await answer(http, COMPLETIONS, HELLO))["choices"]


async def test_a_stranger_costs_no_place_and_a_body_is_not_read(keyed: Service) -> None:
    async with keyed.client() as http:
        for _ in range(5):
            response = await http.post(COMPLETIONS, content=b"x" * 15_000)
            assert response.status_code == 401
    assert not keyed.submitter.generations


async def test_beyond_a_keys_limits_it_is_429_with_when_to_come_again(
    keyed: Service, http: httpx.AsyncClient
) -> None:
    """One may wait for its first token; two may be under way."""
    http.headers.update(GOOD)
    may_begin, may_end = asyncio.Event(), asyncio.Event()
    begin = [Delta(0, "a", (1,))]
    end = [Delta(0, "", (), finished=FinishReason.STOP)]
    keyed.submitter.script = lambda _: [may_begin, begin, may_end, end]
    async with asyncio.TaskGroup() as group, AsyncExitStack() as streams:
        first = group.create_task(streams.enter_async_context(stream_of(http)))
        await keyed.submitter.submitted.wait()
        assert await refusal_of(http) == "This key may have 1 requests that wait for a first token"
        may_begin.set()
        await first
        await streams.enter_async_context(stream_of(http))
        assert await refusal_of(http) == "This key may have 2 requests under way"
        may_end.set()
    assert (await http.post(COMPLETIONS, json=HELLO)).status_code == 200


async def test_the_log_tells_the_name_of_the_key_and_never_the_key_D17(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = {"authorization": "Bearer sk-somebody-elses-key"}
    await http.post(COMPLETIONS, json=HELLO, headers=GOOD)
    await http.post(f"{COMPLETIONS}?key={SECRET}", json=HELLO, headers=wrong)
    ours = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    lines = [record.getMessage() for record in ours]
    assert any("status=200" in line and "key=alice" in line for line in lines)
    assert any("status=401" in line and "error=invalid_api_key" in line for line in lines)
    assert not [line for line in lines if SECRET in line or "somebody" in line]


def stream_of(http: httpx.AsyncClient) -> AbstractAsyncContextManager[httpx.Response]:
    """Entered when its first token is there."""
    return http.stream("POST", COMPLETIONS, json=HELLO | {"stream": True})


async def refusal_of(http: httpx.AsyncClient) -> str:
    response = await http.post(COMPLETIONS, json=HELLO)
    assert (response.status_code, error_of(response)["code"]) == (429, "key_limit")
    assert int(response.headers["retry-after"]) >= 1
    return str(error_of(response)["message"]).partition(",")[0]
