"""The table of endings: whatever happens, a client gets exactly one, and it can tell which.

Whole answers: a body with finish reasons, or an error's own status. Streams: the same before the
first byte; after it, finish reasons or one error event, and then `[DONE]`, always.
"""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from daemon.errors import (
    Draining,
    InvalidRequest,
    NotReady,
    PromptTooLong,
    QueueFull,
    ServeError,
    WorkerFailed,
)
from daemon.generation import Delta
from ipc.vocabulary import FinishReason
from tests.daemon.frontend.fake_submitter import Step
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, HI_CHAT
from tests.daemon.frontend.http_service import Service

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
DIALECTS = [(COMPLETIONS, HELLO), (CHAT, HI_CHAT)]
DIED = WorkerFailed("The worker died.")
BUG = ZeroDivisionError("a bug of ours")
TOO_LONG = PromptTooLong(num_prompt=9, num_output=1, limit=8)


def some(text: str, finished: FinishReason | None = None, choice: int = 0) -> list[Delta]:
    return [Delta(choice, text, (1,), None, finished)]


class Ending(msgspec.Struct, frozen=True):
    """What happens, and what a client has to see of it.

    `status` and `code` are those of an answer whose first byte has not left; `finishes` are the
    finish reasons by choice, or `event` the code of the error event, of a stream that has begun.
    """

    steps: Sequence[Step] = ()
    refusal: ServeError | None = None
    choices: int = 1
    status: int = 200
    code: str | None = None
    finishes: dict[int, str] = {}
    event: str | None = None
    is_begun: bool = True
    num_logged: int = 0


ENDINGS = {
    "stopped": Ending([some("a"), some("b", STOP)], finishes={0: "stop"}),
    "full length": Ending([some("a"), some("b", LENGTH)], finishes={0: "length"}),
    "over at once": Ending([some("", STOP)], finishes={0: "stop"}),
    "choices end apart": Ending(
        [some("a", STOP), some("b", None, 1), some("c", LENGTH, 1)],
        choices=2,
        finishes={0: "stop", 1: "length"},
    ),
    "full": Ending(refusal=QueueFull("Full."), status=429, code="queue_full", is_begun=False),
    "not ready": Ending(refusal=NotReady("No."), status=503, code="not_ready", is_begun=False),
    "draining": Ending(refusal=Draining(), status=503, code="draining", is_begun=False),
    "too long": Ending(
        refusal=TOO_LONG, status=400, code="context_length_exceeded", is_begun=False
    ),
    "died before the first token": Ending([DIED], status=500, code="worker_failed", is_begun=False),
    "refused by the worker": Ending(
        [InvalidRequest("No.")], status=400, code="invalid_value", is_begun=False
    ),
    "died while text was held back": Ending(
        [some(""), DIED], status=500, code="worker_failed", is_begun=False
    ),
    "a bug before the first token": Ending([BUG], status=500, is_begun=False, num_logged=1),
    "died after the first token": Ending(
        [some("a"), DIED], status=500, code="worker_failed", event="worker_failed"
    ),
    "drained after the first token": Ending(
        [some("a"), Draining()], status=503, code="draining", event="draining"
    ),
    "died after one of two choices": Ending(
        [some("a", STOP), some("b", None, 1), DIED],
        choices=2,
        status=500,
        code="worker_failed",
        finishes={0: "stop"},
        event="worker_failed",
    ),
    "a bug after the first token": Ending(
        [some("a"), BUG], status=500, event="server_error", num_logged=1
    ),
}


def prepare(service: Service, ending: Ending) -> None:
    service.submitter.refusal = ending.refusal
    service.submitter.script = lambda _: list(ending.steps)


def check_error(response: httpx.Response, ending: Ending) -> None:
    assert response.status_code == ending.status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == ending.code
    assert "a bug of ours" not in response.text


@pytest.mark.parametrize(("path", "body"), DIALECTS, ids=["completion", "chat"])
@pytest.mark.parametrize("name", ENDINGS)
async def test_a_whole_answer_is_a_body_or_an_error_with_its_status_B4_B8_F11(
    service: Service,
    http: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    ending = ENDINGS[name]
    prepare(service, ending)
    response = await http.post(path, json=body | {"n": ending.choices})
    if ending.status == 200:
        choices = response.json()["choices"]
        assert {each["index"]: each["finish_reason"] for each in choices} == ending.finishes
    else:
        check_error(response, ending)
    assert len([record for record in caplog.records if record.exc_info]) == ending.num_logged


@pytest.mark.parametrize(("path", "body"), DIALECTS, ids=["completion", "chat"])
@pytest.mark.parametrize("name", ENDINGS)
async def test_a_stream_is_an_error_with_its_status_or_ends_by_one_event_and_done_B4_F10_F11(
    service: Service,
    http: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    ending = ENDINGS[name]
    prepare(service, ending)
    response = await http.post(path, json=body | {"n": ending.choices, "stream": True})
    if ending.is_begun:
        assert response.status_code == 200
        check_events(response.text, ending)
    else:
        check_error(response, ending)
    assert len([record for record in caplog.records if record.exc_info]) == ending.num_logged


def check_events(text: str, ending: Ending) -> None:
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]
    errors = [event["error"] for event in events if "error" in event]
    assert [error["code"] or error["type"] for error in errors] == (
        [] if ending.event is None else [ending.event]
    )
    assert "error" not in "".join(map(str, events[:-1]))
    told = [each for event in events for each in event.get("choices", ())]
    finishes = [(each["index"], each["finish_reason"]) for each in told if each["finish_reason"]]
    assert dict(finishes) == ending.finishes
    assert len(finishes) == len(ending.finishes)
