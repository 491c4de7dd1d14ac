import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from daemon.errors import Draining, NotReady, PromptTooLong, QueueFull
from daemon.generation import Delta
from tests.daemon.frontend.fake_submitter import failing
from tests.daemon.frontend.http_calls import COMPLETIONS, FAILURE, HELLO, answer, error_of, lines
from tests.daemon.frontend.http_service import Service


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("The queue is full.", retry_after_s=3), 429, "queue_full"),
        (NotReady("Starting."), 503, "not_ready"),
        (Draining("Ending."), 503, "draining"),
        (PromptTooLong(num_prompt=9, num_output=1, limit=8), 400, "context_length_exceeded"),
    ],
)
async def test_a_refusal_at_the_door_has_its_own_status_B8_D15(
    service: Service,
    http: httpx.AsyncClient,
    stream: bool,
    error: Exception,
    status: int,
    code: str,
) -> None:
    service.submitter.refusal = error
    response = await http.post(COMPLETIONS, json=HELLO | {"stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_a_full_house_says_when_to_come_back_D13(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.refusal = QueueFull("The queue is full.", retry_after_s=3)
    response = await http.post(COMPLETIONS, json=HELLO)
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "3000")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_has_its_own_status_F11(
    service: Service, http: httpx.AsyncClient, stream: bool
) -> None:
    service.submitter.script = failing(FAILURE)
    response = await http.post(COMPLETIONS, json=HELLO | {"stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (500, "worker_failed")


async def test_a_failure_after_the_first_byte_is_an_event_and_an_end_B4_F10(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.script = failing(FAILURE, [Delta(0, "a", (1,))])
    _, failure, end = await lines(http, COMPLETIONS, HELLO)
    assert json.loads(failure) == FAILURE.body
    assert end == "[DONE]"


async def test_a_failure_while_text_is_held_back_still_has_its_own_status_F11(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.script = failing(FAILURE, [Delta(0, "", (1,))])
    response = await http.post(COMPLETIONS, json=HELLO | {"stream": True})
    assert response.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_logged_once_and_hidden(
    service: Service,
    http: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    service.submitter.script = lambda _: [KeyError("internal detail")]
    response = await http.post(COMPLETIONS, json=HELLO | {"stream": stream})
    assert response.status_code == 500
    assert "internal detail" not in error_of(response)["message"]
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_a_bug_after_the_first_byte_is_logged_once_and_ends_the_stream(
    service: Service, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.submitter.script = lambda _: [[Delta(0, "a", (1,))], KeyError("internal detail")]
    _, failure, end = await lines(http, COMPLETIONS, HELLO)
    assert json.loads(failure)["error"]["type"] == "server_error"
    assert end == "[DONE]"
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_another_model_is_not_found_E18(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json=HELLO | {"model": "nope"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_the_models_name_may_be_left_out(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, {"prompt": "hello"})
    assert content["model"] == "tiny"


async def test_a_bad_body_never_reaches_the_controller_A2(
    service: Service, http: httpx.AsyncClient
) -> None:
    response = await http.post(COMPLETIONS, json=HELLO | {"n": 0})
    assert (response.status_code, error_of(response)["param"]) == (400, "n")
    assert service.submitter.generations == []


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/completions/", "/health/x"])
async def test_an_unknown_path_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


async def test_a_wrong_method_is_told_the_right_one(http: httpx.AsyncClient) -> None:
    response = await http.get(COMPLETIONS)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_a_body_too_large_is_refused_by_its_announced_length_E25(service: Service) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\ncontent-length: 1000000000\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()
    await writer.wait_closed()


async def test_a_body_too_large_is_refused_while_it_is_read_E25(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    headers = {"content-type": "application/json"}
    response = await http.post(COMPLETIONS, content=endless(), headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_a_body_that_is_no_plain_json_is_refused_E25(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    response = await http.post(COMPLETIONS, content=json.dumps(HELLO), headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10_000])
async def test_a_body_that_is_no_json_is_refused_E25(
    http: httpx.AsyncClient, content: bytes
) -> None:
    response = await http.post(COMPLETIONS, content=content)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")
