"""Which web pages may ask: those of the configured origins; all others get what they always get."""

from collections.abc import AsyncIterator

import httpx
import pytest

from daemon.frontend.app import build_app
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, LIMITS, REPLY
from tests.daemon.frontend.http_service import Service

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


@pytest.fixture(params=[[PAGE, "http://other"], ["*"]], ids=["named", "any"])
async def open_http(
    tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service that a page may use."""
    service = Service(tokenizer, reply=REPLY, limits=LIMITS)
    service.app = build_app(
        service.submitter,
        service.model,
        service.readiness,
        lambda: ("", b""),
        LIMITS,
        cors_origins=request.param,
    )
    async with service.running(), service.client() as client:
        yield client


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/health"])
async def test_a_preflight_is_answered_without_a_key_E17(
    open_http: httpx.AsyncClient, path: str
) -> None:
    response = await open_http.options(path, headers=PREFLIGHT)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "x-stainless-os" in response.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, HELLO), (COMPLETIONS, HELLO | {"stream": True}), (COMPLETIONS, {}), ("/x", {})],
)
async def test_a_page_may_read_answers_and_refusals_E17(
    open_http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    response = await open_http.post(path, json=body, headers={"origin": PAGE})
    assert response.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "retry-after" in response.headers["access-control-expose-headers"]
    assert response.headers["vary"] == "origin"


async def test_another_page_is_told_nothing(open_http: httpx.AsyncClient) -> None:
    headers = PREFLIGHT | {"origin": "https://evil.example"}
    for method in ("OPTIONS", "POST"):
        response = await open_http.request(method, COMPLETIONS, headers=headers, json=HELLO)
        assert response.headers.get("access-control-allow-origin") in (None, "*")
        assert response.headers["vary"] == "origin"


async def test_without_origins_no_page_is_let_in_and_options_tells_the_methods(
    http: httpx.AsyncClient,
) -> None:
    response = await http.options(COMPLETIONS, headers=PREFLIGHT)
    assert (response.status_code, response.headers["allow"]) == (204, "POST, OPTIONS")
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert "vary" not in response.headers


async def test_options_of_an_unknown_path_is_not_found(http: httpx.AsyncClient) -> None:
    assert (await http.options("/v1/nothing", headers=PREFLIGHT)).status_code == 404


async def test_headers_that_a_page_names_cannot_break_the_answer(
    open_http: httpx.AsyncClient,
) -> None:
    headers = PREFLIGHT | {"access-control-request-headers": "é, \t x"}
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert (await open_http.options(COMPLETIONS, headers=encoded)).status_code == 204
