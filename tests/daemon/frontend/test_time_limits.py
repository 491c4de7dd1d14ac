"""What clients see when time runs out: the real controller behind the real application, and
instances that never answer by themselves."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from daemon.deadlines import TimeLimits
from daemon.frontend.app import build_app
from daemon.frontend.served_model import ServedModel
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, LIMITS, error_of
from tests.daemon.frontend.http_service import SwitchedReadiness
from tests.daemon.mute import MuteHouse

LATE_S = 100.0


def client_of(house: MuteHouse, model: ServedModel) -> httpx.AsyncClient:
    app = build_app(house.controller, model, SwitchedReadiness(), lambda: ("", b""), LIMITS)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


async def sent(house: MuteHouse, model: ServedModel, **more: Any) -> "asyncio.Task[httpx.Response]":
    """A request that has come to its prefill instance."""

    async def post() -> httpx.Response:
        async with client_of(house, model) as client:
            return await client.post(COMPLETIONS, json=HELLO | more)

    house.has_sent.clear()
    posting = asyncio.create_task(post())
    await house.has_sent.wait()
    return posting


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_turn_does_not_come_is_told_when_to_come_again_D14(
    model: ServedModel, stream: bool
) -> None:
    house = MuteHouse(model.tokenizer, time_limits=TimeLimits(queue_s=LATE_S))
    with house.ask(10):
        asked = await sent(house, model, stream=stream)
        house.wait_until(LATE_S)
        response = await asked
    assert response.status_code == 429
    assert error_of(response)["code"] == "queue_timeout"
    assert error_of(response)["type"] == "rate_limit_error"
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert 1 <= int(response.headers["retry-after-ms"]) <= 120_000


async def test_a_request_that_takes_too_long_before_its_first_byte_is_504_A16(
    model: ServedModel,
) -> None:
    house = MuteHouse(model.tokenizer, time_limits=TimeLimits(request_s=LATE_S))
    asked = await sent(house, model)
    house.wait_until(LATE_S)
    response = await asked
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert house.controller.num_open == 0


async def test_a_stream_that_takes_too_long_ends_by_an_error_event_A16_F10(
    model: ServedModel,
) -> None:
    house = MuteHouse(model.tokenizer, time_limits=TimeLimits(request_s=LATE_S))
    asked = await sent(house, model, stream=True)
    house.prefilled(house.prefills()[0], 0.0, 0.1)
    house.wait_until(LATE_S)
    response = await asked
    assert response.status_code == 200
    first, error, end = (event.removeprefix("data: ") for event in events(response))
    assert json.loads(first)["choices"][0]["text"]
    assert json.loads(error)["error"]["code"] == "deadline_exceeded"
    assert end == "[DONE]"


async def test_a_request_that_no_instance_comes_up_for_is_503_B13(model: ServedModel) -> None:
    house = MuteHouse(model.tokenizer, time_limits=TimeLimits(outage_s=LATE_S))
    asked = await sent(house, model)
    house.down("p0")
    house.wait_until(LATE_S)
    response = await asked
    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"
    assert response.headers["retry-after"]


def events(response: httpx.Response) -> list[Any]:
    return [event for event in response.text.split("\n\n") if event]
