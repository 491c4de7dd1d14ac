import json
import logging
from typing import Any

import httpx
import pytest

from daemon.frontend.app import build_app
from daemon.generation import Delta
from daemon.text import Tokenizer
from ipc.journal import JsonFormatter
from tests.daemon.frontend.fake_submitter import failing
from tests.daemon.frontend.http_calls import COMPLETIONS, FAILURE, HELLO, LIMITS, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.mute import MuteHouse


async def test_a_requests_own_name_is_kept_E13(http: httpx.AsyncClient) -> None:
    response = await http.get("/health", headers={"x-request-id": "My_id-1.2"})
    assert response.headers["x-request-id"] == "My_id-1.2"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a;b", "{}"])
async def test_a_harmful_name_is_replaced_E13(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get("/health", headers={"x-request-id": name})
    assert response.headers["x-request-id"] not in ("", name)


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, HELLO), (COMPLETIONS, HELLO | {"stream": True}), (COMPLETIONS, {}), ("/x", {})],
)
async def test_every_response_has_a_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(path, json=body)
    assert len(response.headers["x-request-id"]) == 32


async def log_line(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> str:
    caplog.set_level(logging.INFO, logger="daemon.frontend.request_log")
    await http.post(path, json=body, headers={"x-request-id": "me"})
    (record,) = [each for each in caplog.records if each.name == "daemon.frontend.request_log"]
    return record.getMessage()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_logged_in_one_line_of_counts(
    http: httpx.AsyncClient,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    line = await log_line(http, caplog, COMPLETIONS, HELLO | {"stream": stream})
    num_output = len(tokenizer.encode(REPLY)) + 1
    assert line.startswith(f"request me POST {COMPLETIONS} status=200")
    assert f"output_tokens={num_output} " in line
    assert "ttft_ms=-" not in line


@pytest.mark.parametrize("stream", [False, True])
async def test_no_word_of_a_prompt_is_logged_at_any_level_D17(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    body = HELLO | {"prompt": "my secret", "user": "my secret", "stream": stream}
    key = {"authorization": "Bearer my-secret", "x-request-id": "my secret"}
    await http.post(f"{COMPLETIONS}?key=secret", json=body, headers=key)
    ours = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    assert ours
    assert "secret" not in " ".join(record.getMessage() for record in ours)


async def test_an_unknown_path_is_not_logged_D7(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    line = await log_line(http, caplog, "/my/secret", {})
    assert "POST unmatched status=404" in line


async def test_a_failed_stream_is_logged_with_its_error(
    service: Service, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.submitter.script = failing(FAILURE, [Delta(0, "a", (1,))])
    line = await log_line(http, caplog, COMPLETIONS, HELLO | {"stream": True})
    assert line.endswith("error=worker_failed")


async def test_a_path_makes_no_metric_D7(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer)
    service = Service(tokenizer, reply=REPLY, limits=LIMITS)
    service.app = build_app(
        house.controller,
        service.model,
        service.readiness,
        lambda: house.metrics.render(house.controller.count_phases()),
        LIMITS,
    )
    async with service.running(), service.client() as http:
        before = len((await http.get("/metrics")).text.splitlines())
        for index in range(20):
            assert (await http.get(f"/a/random-path-{index}")).status_code == 404
        after = await http.get("/metrics")
    assert "random-path" not in after.text
    assert len(after.text.splitlines()) == before


async def test_the_line_tells_the_five_stages_and_json_the_same_facts(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    line = await log_line(http, caplog, COMPLETIONS, HELLO)
    stages = "prefill_queue_ms=100.0 prefill_ms=200.0 transfer_ms=300.0 decode_queue_ms=400.0"
    assert f"{stages} decode_ms=500.0" in line
    (record,) = [each for each in caplog.records if each.name == "daemon.frontend.request_log"]
    told = json.loads(JsonFormatter().format(record))
    assert (told["request_id"], told["route"], told["status"]) == ("me", COMPLETIONS, 200)
    assert (told["transfer_ms"], told["level"]) == (300.0, "info")
