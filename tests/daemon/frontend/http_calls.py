"""What the tests of the HTTP face send, and how they read what comes back."""

import json
from typing import Any

import httpx

from daemon.errors import WorkerFailed
from daemon.frontend.bodies import Limits

REPLY = " quick 世界 🎉!"
LIMITS = Limits(max_body_bytes=20_000, stall_s=0.2)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "prompt": "hello", "max_tokens": 100}
HI_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
FAILURE = WorkerFailed("The worker died.")


async def answer(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


async def lines(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    """The data of all events of a streamed answer, `[DONE]` included."""
    response = await http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


async def chunks(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any
) -> list[dict[str, Any]]:
    """All events but the last, which is the mark of the end."""
    *events, end = await lines(http, path, body | more)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
