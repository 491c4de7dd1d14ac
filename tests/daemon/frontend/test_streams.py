import asyncio
import json
from typing import Any

import httpx
import pytest

from daemon.generation import Delta
from ipc.vocabulary import FinishReason
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, HI_CHAT, answer, chunks
from tests.daemon.frontend.http_service import Service


async def test_a_streamed_completion_has_the_apis_shape(http: httpx.AsyncClient) -> None:
    first, *_, last = await chunks(http, COMPLETIONS, HELLO)
    assert first.pop("id") == last.pop("id")
    assert first.pop("created") == last.pop("created")
    head = {"object": "text_completion", "model": "tiny"}
    plain = {"index": 0, "text": " quick", "logprobs": None, "finish_reason": None}
    assert first["choices"][0]["text"] in " quick"
    assert first == head | {"choices": [plain | {"text": first["choices"][0]["text"]}]}
    assert last == head | {"choices": [plain | {"text": "", "finish_reason": "stop"}]}


async def test_the_role_comes_together_with_the_first_content(http: httpx.AsyncClient) -> None:
    first, second, *_, last = await chunks(http, CHAT, HI_CHAT)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"].keys() == {"role", "content"}
    assert first["choices"][0]["delta"]["content"]
    assert second["choices"][0]["delta"].keys() == {"content"}
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("more", [{}, {"stop": ["界 🎉"]}, {"max_tokens": 7}, {"n": 3}])
async def test_a_stream_joins_to_the_whole_text(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    whole = await answer(http, COMPLETIONS, HELLO | more)
    texts = ["" for _ in whole["choices"]]
    for chunk in await chunks(http, COMPLETIONS, HELLO | more):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


async def test_every_choice_of_a_chat_stream_has_its_role(http: httpx.AsyncClient) -> None:
    events = await chunks(http, CHAT, HI_CHAT, n=3)
    roles = [event["choices"][0]["index"] for event in events if "role" in str(event)]
    assert roles == [0, 1, 2]


async def test_no_chunk_is_sent_while_text_is_held_back(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.script = lambda _: [
        [Delta(0, "", (1,))],
        [Delta(0, "世", (2,))],
        [Delta(0, "", (3,))],
        [Delta(0, "界", (4,), None, FinishReason.LENGTH)],
    ]
    events = await chunks(http, COMPLETIONS, HELLO, stream_options={"include_usage": True})
    assert [choice["text"] for event in events for choice in event["choices"]] == ["世", "界"]
    assert events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_is_not_told_unless_asked_for_F13(
    http: httpx.AsyncClient, options: dict[str, Any] | None
) -> None:
    events = await chunks(http, CHAT, HI_CHAT, stream_options=options)
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, HELLO), (CHAT, HI_CHAT)])
async def test_usage_comes_in_one_last_chunk_without_choices_F13(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = await answer(http, path, body)
    *events, last = await chunks(http, path, body, stream_options={"include_usage": True})
    assert [event["usage"] for event in events] == [None] * len(events)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


async def test_usage_may_run_along(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await chunks(http, COMPLETIONS, HELLO, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 1


async def test_timing_comes_in_the_last_chunk(http: httpx.AsyncClient) -> None:
    *_, last = await chunks(http, CHAT, HI_CHAT, return_timing=True)
    assert (last["choices"], last["timing"]["transfer_s"]) == ([], 0.3)


async def test_a_stream_says_that_it_is_one(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json=HELLO | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_what_is_pending_leaves_in_one_send(service: Service) -> None:
    service.submitter.script = lambda _: [
        [Delta(0, "a", (1,)), Delta(0, "b", (2,)), Delta(0, "c", (3,))],
        [Delta(0, "d", (4,), None, FinishReason.LENGTH)],
    ]
    bodies = await bodies_sent(service, HELLO | {"stream": True})
    assert [body.count(b"data: ") for body in bodies] == [3, 1, 1]


async def bodies_sent(service: Service, body: dict[str, Any]) -> list[bytes]:
    """Call the application itself, and see each of its sends."""
    sent: list[bytes] = []
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    await service.app(scope, incoming.get, send)
    return sent


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, HELLO), (CHAT, HI_CHAT)])
async def test_token_ids_are_told_when_asked_for_streamed_as_whole(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = await answer(http, path, body | {"return_token_ids": True})
    streamed = await chunks(http, path, body, return_token_ids=True)
    token_ids = [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]]
    assert token_ids == whole["choices"][0]["token_ids"]
    assert len(token_ids) == whole["usage"]["completion_tokens"]
