"""The API's description: whole, true, and made from what checks and routes requests."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from daemon.frontend import answer_types as answers
from daemon.frontend.openapi import OPERATIONS, document
from daemon.frontend.schema import ChatBody, CompletionBody
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, HI_CHAT, answer, chunks

MORE: list[dict[str, Any]] = [
    {},
    {"n": 2, "return_token_ids": True},
    {"return_timing": True},
    {"echo": True, "logprobs": 2},
    {"prompt": ["a", "b"], "return_timing": True},
    {"max_tokens": 1, "stop": "q"},
]
CHAT_MORE: list[dict[str, Any]] = [
    {},
    {"n": 2, "return_token_ids": True},
    {"return_timing": True},
    {"logprobs": True, "top_logprobs": 2},
]
STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def check_is(value: Any, kind: type) -> None:
    """Of this type, and nothing that the type does not tell."""
    assert msgspec.to_builtins(msgspec.convert(value, kind)) == value


async def test_the_description_is_served(http: httpx.AsyncClient) -> None:
    response = await http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == json.loads(json.dumps(document()))


def test_every_reference_leads_somewhere() -> None:
    described = document()
    text = json.dumps(described)
    references = {part.partition('"')[0] for part in text.split('"$ref": "')[1:]}
    assert len(references) > 20
    for reference in references:
        found = described
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
        assert found


def test_bodies_are_described_field_by_field() -> None:
    schemas = document()["components"]["schemas"]
    for kind in (CompletionBody, ChatBody):
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert schemas[kind.__name__]["properties"].keys() == fields


@pytest.mark.parametrize("status", [400, 404, 408, 413, 414, 429, 431, 500, 503, 504])
def test_every_refusal_is_described(status: int) -> None:
    described = document()
    for operation in OPERATIONS:
        responses = described["paths"][operation.public_path][operation.method.lower()]["responses"]
        assert str(status) in responses


@pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if each.body is None], ids=lambda each: each.name
)
async def test_what_is_asked_for_without_a_body_is_as_described(
    http: httpx.AsyncClient, operation: Any
) -> None:
    response = await http.get(operation.public_path.replace("{model_id}", "tiny"))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(operation.content_type)
    if operation.answer is not None:
        check_is(response.json(), operation.answer)


@pytest.mark.parametrize("more", MORE, ids=str)
async def test_completions_are_as_described(http: httpx.AsyncClient, more: dict[str, Any]) -> None:
    check_is(await answer(http, COMPLETIONS, HELLO | more), answers.Completion)
    for options in ({}, {"stream_options": STREAM_OPTIONS}):
        for chunk in await chunks(http, COMPLETIONS, HELLO | more | options):
            check_is(chunk, answers.CompletionChunk)


@pytest.mark.parametrize("more", CHAT_MORE, ids=str)
async def test_chats_are_as_described(http: httpx.AsyncClient, more: dict[str, Any]) -> None:
    check_is(await answer(http, CHAT, HI_CHAT | more), answers.ChatCompletion)
    for options in ({}, {"stream_options": STREAM_OPTIONS}):
        for chunk in await chunks(http, CHAT, HI_CHAT | more | options):
            check_is(chunk, answers.ChatCompletionChunk)


@pytest.mark.parametrize(
    ("path", "content"),
    [(COMPLETIONS, b"{"), (COMPLETIONS, b"{}"), ("/x", b"{}"), (COMPLETIONS, b"x" * 30_000)],
)
async def test_refusals_are_as_described(
    http: httpx.AsyncClient, path: str, content: bytes
) -> None:
    response = await http.post(path, content=content)
    assert response.status_code >= 400
    check_is(response.json(), answers.ErrorBody)
