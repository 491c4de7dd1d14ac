import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from daemon.errors import Draining, NotReady, PromptTooLong, QueueFull, WorkerFailed
from daemon.frontend.app import Limits
from daemon.generation import Delta
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason, TokenLogprobs
from tests.daemon.fake_submitter import failing
from tests.daemon.http_service import Service
from tests.daemon.small_tokenizers import byte_level_directory, load, sentence_piece_directory

REPLY = " quick 世界 🎉!"
LIMITS = Limits(max_body_bytes=20_000, stall_s=0.2)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "prompt": "hello", "max_tokens": 100}
HI_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
FAILURE = WorkerFailed("The worker died.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.fixture
async def service(tokenizer: Tokenizer) -> AsyncIterator[Service]:
    async with Service(tokenizer, reply=REPLY, limits=LIMITS).running() as service:
        yield service


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with service.client() as client:
        yield client


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


# Whole answers


async def test_a_completion_has_the_apis_shape(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    content = await answer(http, COMPLETIONS, HELLO)
    assert content.pop("id").startswith("cmpl-")
    assert isinstance(content.pop("created"), int)
    num_prompt, num_output = len(tokenizer.encode("hello")), len(tokenizer.encode(REPLY)) + 1
    assert content == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_chat_has_the_apis_shape(http: httpx.AsyncClient) -> None:
    content = await answer(http, CHAT, HI_CHAT)
    assert content["id"].startswith("chatcmpl-")
    assert content["object"] == "chat.completion"
    assert content["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


async def test_choices_are_numbered_over_all_prompts(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"prompt": ["a", "b"], "n": 3})
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2, 3, 4, 5]


async def test_a_prompt_counts_once_however_many_choices_it_has(http: httpx.AsyncClient) -> None:
    one = await answer(http, COMPLETIONS, HELLO)
    three = await answer(http, COMPLETIONS, HELLO | {"n": 3})
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


async def test_a_single_token_ends_by_length(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"max_tokens": 1})
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 1


async def test_a_text_ends_before_its_stop_string(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"stop": ["世界"]})
    assert (content["choices"][0]["text"], content["choices"][0]["finish_reason"]) == (
        " quick ",
        "stop",
    )


async def test_the_five_stages_are_told_when_asked_for(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"return_timing": True})
    assert content["timing"] == {
        "prefill_queue_s": 0.1,
        "prefill_s": 0.2,
        "transfer_s": 0.3,
        "decode_queue_s": 0.4,
        "decode_s": 0.5,
    }


async def test_several_prompts_have_a_timing_each(http: httpx.AsyncClient) -> None:
    body = HELLO | {"return_timing": True, "prompt": ["a", "b"]}
    assert len((await answer(http, COMPLETIONS, body))["timing"]) == 2


# Streamed answers


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
async def test_usage_is_not_told_unless_asked_for(
    http: httpx.AsyncClient, options: dict[str, Any] | None
) -> None:
    events = await chunks(http, CHAT, HI_CHAT, stream_options=options)
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, HELLO), (CHAT, HI_CHAT)])
async def test_usage_comes_in_one_last_chunk_without_choices(
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


# Log probabilities and echo


async def test_echo_comes_before_the_answer(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"echo": True})
    assert content["choices"][0]["text"] == "hello" + REPLY


async def test_an_echoed_stream_begins_with_the_prompt(http: httpx.AsyncClient) -> None:
    events = await chunks(http, COMPLETIONS, HELLO | {"echo": True, "prompt": ["hello", "world"]})
    starts = [next(e for e in events if e["choices"][0]["index"] == k) for k in range(2)]
    assert starts[0]["choices"][0]["text"].startswith("hello")
    assert starts[1]["choices"][0]["text"].startswith("world")


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "prompt": "世界 hello"}])
async def test_offsets_point_into_the_text(http: httpx.AsyncClient, more: dict[str, Any]) -> None:
    (choice,) = (await answer(http, COMPLETIONS, HELLO | {"logprobs": 2} | more))["choices"]
    logprobs = choice["logprobs"]
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    pieces = [
        choice["text"][start:end] for start, end in zip(logprobs["text_offset"], ends, strict=True)
    ]
    assert "".join(pieces) == choice["text"]
    whole = [
        (token, piece)
        for token, piece in zip(logprobs["tokens"], pieces, strict=True)
        if not token.startswith(("bytes:", "<|")) and "\ufffd" not in piece and len(piece) > 1
    ]
    assert whole
    assert all(token == piece for token, piece in whole)


async def test_every_token_has_its_log_probability(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"logprobs": 2})
    logprobs = content["choices"][0]["logprobs"]
    num_tokens = content["usage"]["completion_tokens"]
    assert {len(values) for values in logprobs.values()} == {num_tokens}
    assert logprobs["tokens"][0] == tokenizer.token_text(tokenizer.encode(REPLY)[0])
    assert logprobs["token_logprobs"][0] == -0.5
    assert len(logprobs["top_logprobs"][0]) == 2


async def test_echoed_log_probabilities_cover_the_prompt_with_nothing_for_its_first_token(
    http: httpx.AsyncClient,
) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"logprobs": 1, "echo": True})
    logprobs = content["choices"][0]["logprobs"]
    usage = content["usage"]
    assert {len(values) for values in logprobs.values()} == {usage["total_tokens"]}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert None not in logprobs["token_logprobs"][1:]


@pytest.mark.parametrize("more", [{"n": 2}, {"echo": True, "n": 2, "prompt": ["hello", "a fox"]}])
async def test_streamed_log_probabilities_join_to_the_whole_ones(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    body = HELLO | {"logprobs": 2} | more
    whole = await answer(http, COMPLETIONS, body)
    joined: list[dict[str, list[Any]]] = [{} for _ in whole["choices"]]
    for event in await chunks(http, COMPLETIONS, body):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[event["choices"][0]["index"]].setdefault(name, []).extend(values)
    assert joined == [choice["logprobs"] for choice in whole["choices"]]


async def test_a_prompt_is_scored_without_a_token_drawn(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    body = HELLO | {"max_tokens": 0, "echo": True, "logprobs": 1}
    content = await answer(http, COMPLETIONS, body)
    (choice,) = content["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode("hello"))
    assert content["usage"]["completion_tokens"] == 0


async def test_a_chats_log_probabilities_carry_the_bytes(http: httpx.AsyncClient) -> None:
    content = await answer(http, CHAT, HI_CHAT | {"logprobs": True, "top_logprobs": 2})
    entries = content["choices"][0]["logprobs"]["content"]
    assert len(entries) == content["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == REPLY.encode()
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert entries[0]["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}


async def test_an_impossible_tokens_log_probability_is_a_number(
    service: Service, http: httpx.AsyncClient
) -> None:
    body = HELLO | {"logprobs": 0}
    service.submitter.script = lambda _: [[_unlikely()]]
    content = await answer(http, COMPLETIONS, body)
    assert content["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def _unlikely() -> Delta:
    entry = TokenLogprobs(7, float("-inf"))
    return Delta(0, "x", (7,), (entry,), FinishReason.LENGTH)


async def test_a_bos_has_no_text_in_an_echo(tmp_path: Path) -> None:
    tokenizer = load(sentence_piece_directory(tmp_path / "m"))
    async with (
        Service(tokenizer, reply=" hello", limits=LIMITS).running() as service,
        service.client() as http,
    ):
        body = HELLO | {"prompt": "How are you", "echo": True, "logprobs": 1}
        (choice,) = (await answer(http, COMPLETIONS, body))["choices"]
    assert choice["text"].startswith("How are you")
    assert choice["logprobs"]["tokens"][0] == "<s>"
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]


# Refusals


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
async def test_a_refusal_at_the_door_has_its_own_status(
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


async def test_a_full_house_says_when_to_come_back(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.refusal = QueueFull("The queue is full.", retry_after_s=3)
    response = await http.post(COMPLETIONS, json=HELLO)
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "3000")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_has_its_own_status(
    service: Service, http: httpx.AsyncClient, stream: bool
) -> None:
    service.submitter.script = failing(FAILURE)
    response = await http.post(COMPLETIONS, json=HELLO | {"stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (500, "worker_failed")


async def test_a_failure_after_the_first_byte_is_an_event_and_an_end(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.script = failing(FAILURE, [Delta(0, "a", (1,))])
    _, failure, end = await lines(http, COMPLETIONS, HELLO)
    assert json.loads(failure) == FAILURE.body
    assert end == "[DONE]"


async def test_a_failure_while_text_is_held_back_still_has_its_own_status(
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


async def test_another_model_is_not_found(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json=HELLO | {"model": "nope"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_the_models_name_may_be_left_out(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, {"prompt": "hello"})
    assert content["model"] == "tiny"


async def test_a_bad_body_never_reaches_the_controller(
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


async def test_a_body_too_large_is_refused_by_its_announced_length(
    http: httpx.AsyncClient,
) -> None:
    response = await http.post(COMPLETIONS, json=HELLO | {"user": "x" * 20_000})
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


async def test_a_body_too_large_is_refused_while_it_is_read(http: httpx.AsyncClient) -> None:
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
async def test_a_body_that_is_no_plain_json_is_refused(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    response = await http.post(COMPLETIONS, content=json.dumps(HELLO), headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10_000])
async def test_a_body_that_is_no_json_is_refused(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post(COMPLETIONS, content=content)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")


# Clients that leave or stall


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_deltas", [0, 1])
async def test_a_client_that_leaves_aborts_its_request(
    service: Service, stream: bool, num_deltas: int
) -> None:
    never = asyncio.Event()
    service.submitter.script = lambda _: [*([[Delta(0, "a", (1,))]] * num_deltas), never]
    connection = await send_request(service, HELLO | {"stream": stream})
    await service.submitter.submitted.wait()
    if stream and num_deltas:
        await asyncio.get_running_loop().sock_recv(connection, 10)
    connection.close()
    await service.submitter.last.left.wait()
    assert service.submitter.last.is_aborted


async def test_a_client_that_stops_reading_aborts_its_request(service: Service) -> None:
    service.submitter.script = lambda _: [[Delta(0, "x" * 1_000_000, (1,))] for _ in range(50)]
    connection = await send_request(service, HELLO | {"stream": True})
    await service.submitter.submitted.wait()
    await service.submitter.last.left.wait()
    assert service.submitter.last.is_aborted
    connection.close()


async def test_a_slow_engine_is_no_stalled_client(
    service: Service, http: httpx.AsyncClient
) -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(2.5 * LIMITS.stall_s, late.set)
    end = Delta(0, "b", (2,), None, FinishReason.LENGTH)
    service.submitter.script = lambda _: [[Delta(0, "a", (1,))], late, [end]]
    assert len(await chunks(http, COMPLETIONS, HELLO)) == 2


async def test_a_finished_request_is_not_aborted(service: Service, http: httpx.AsyncClient) -> None:
    await chunks(http, COMPLETIONS, HELLO)
    assert not service.submitter.last.is_aborted


async def test_a_client_that_leaves_amid_its_body_disturbs_nobody(
    service: Service, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connection = await send_request(service, HELLO, announced_bytes=1000)
    connection.close()
    await answer(http, COMPLETIONS, HELLO)
    assert len(service.submitter.generations) == 1
    assert not [record for record in caplog.records if record.exc_info]


async def send_request(
    service: Service, body: dict[str, Any], *, announced_bytes: int | None = None
) -> socket.socket:
    """A raw connection that has sent its request and read nothing."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", service.port))
    content = json.dumps(body).encode()
    length = announced_bytes or len(content)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + content)
    return connection


# Names and log lines


async def test_a_requests_own_name_is_kept(http: httpx.AsyncClient) -> None:
    response = await http.get("/health", headers={"x-request-id": "My_id-1.2"})
    assert response.headers["x-request-id"] == "My_id-1.2"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a;b", "{}"])
async def test_a_harmful_name_is_replaced(http: httpx.AsyncClient, name: str) -> None:
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


async def test_no_word_of_a_prompt_is_logged(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = HELLO | {"prompt": "my secret", "user": "my secret"}
    assert "secret" not in await log_line(http, caplog, COMPLETIONS, body)


async def test_an_unknown_path_is_not_logged(
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


# Other endpoints


async def test_the_served_model_is_listed(http: httpx.AsyncClient) -> None:
    content = (await http.get("/v1/models")).json()
    assert content["object"] == "list"
    assert content["data"] == [
        {
            "id": "tiny",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "distserved",
            "root": "tiny",
            "max_model_len": 256,
        }
    ]


async def test_the_served_model_is_found_by_name(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"


@pytest.mark.parametrize("name", ["nope", "some/other"])
async def test_another_model_is_not_found_by_name(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get(f"/v1/models/{name}")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_health_says_ready(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200


async def test_health_says_why_it_is_not_ready_and_when_to_ask_again(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.readiness.refusal = Draining("The service is ending.")
    response = await http.get("/health")
    assert (response.status_code, error_of(response)["code"]) == (503, "draining")
    assert response.headers["retry-after"] == "2"


async def test_the_process_lives_even_when_it_cannot_serve(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.readiness.refusal = NotReady("Starting.")
    assert (await http.get("/health/live")).status_code == 200


async def test_metrics_are_those_of_the_renderer(http: httpx.AsyncClient) -> None:
    response = await http.get("/metrics")
    assert (response.headers["content-type"], response.text) == ("text/plain", "up 1\n")


async def test_the_version_is_told(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json()["version"]


async def test_a_connection_serves_one_stream_after_the_other(service: Service) -> None:
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=service.url, limits=limits) as http:
        for _ in range(3):
            await chunks(http, COMPLETIONS, HELLO)
    assert len(service.submitter.generations) == 3
