"""What is ignored is counted: by few names, whatever clients send."""

import logging
from collections import Counter

import httpx
import orjson
import pytest

from daemon.frontend.app import build_app
from daemon.frontend.bodies import Limits
from daemon.frontend.schema import ChatBody, read_body
from daemon.frontend.served_model import ServedModel
from daemon.frontend.unknown_fields import MAX_NAMES, MAX_PER_BODY, OTHER, UnknownFields
from tests.daemon.frontend.fake_submitter import FakeSubmitter
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, REPLY
from tests.daemon.frontend.http_service import CONTEXT, SwitchedReadiness

TALK = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
NEW = {"a_field_of_next_year": [1], "tools": [], "user": "me", "min_p": 0.5}


class Book:
    """Counts of names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.fields = UnknownFields(self.count)

    def count(self, name: str) -> None:
        self.counts[name] += 1


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, HELLO), (CHAT, TALK)])
async def test_fields_that_nobody_knows_are_counted_and_those_of_the_api_are_not(
    model: ServedModel, path: str, body: dict[str, object]
) -> None:
    book = Book()
    submitter = FakeSubmitter(model.tokenizer, reply=REPLY, context=CONTEXT)
    app = build_app(
        submitter, model, SwitchedReadiness(), lambda: ("", b""), Limits(), unknown=book.fields
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for more in ({}, NEW, NEW | {"metadata": {"a": "x" * 100_000}}):
            response = await client.post(path, json=body | more)
            assert response.status_code == 200, response.text
    assert book.counts == {"a_field_of_next_year": 2}


def test_fields_of_objects_within_a_body_are_counted_by_their_paths() -> None:
    """Once a body, however many messages have them."""
    book = Book()
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part, part], "mood": "x"}
    body = {
        "messages": [message, message | {"content": "a", "tone": "y"}],
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    read_body(orjson.dumps(body), ChatBody, book.fields)
    assert book.counts == {
        "messages.content.cache_control": 1,
        "messages.mood": 1,
        "messages.tone": 1,
        "stream_options.include_obfuscation": 1,
    }


def test_an_answer_that_comes_back_as_a_message_has_nothing_unknown() -> None:
    book = Book()
    empty = {"refusal": None, "annotations": [], "tool_calls": None, "audio": None}
    answer = {"role": "assistant", "content": "a", **empty}
    read_body(
        orjson.dumps({"messages": [answer], "metadata": {"a": {"b": 1}}}), ChatBody, book.fields
    )
    assert not book.counts


def test_a_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = Book().fields
    fields.came(["thinking"])
    fields.came(["thinking"])
    assert caplog.messages == [
        "requests have a field 'thinking', which is not known here and is ignored"
    ]


@pytest.mark.parametrize("name", ["", "x" * 41, "two words", "line\nbreak", "größe", "1st"])
def test_what_is_no_plain_name_is_counted_without_it_D7_D17(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO)
    book = Book()
    book.fields.came([name])
    assert book.counts == {OTHER: 1}
    assert not caplog.messages


def test_however_many_names_clients_make_up_few_are_told_apart_D7() -> None:
    book = Book()
    for number in range(1000):
        book.fields.came([f"field_{number}"])
    book.fields.came([f"field_{number}" for number in range(1000)])
    assert len(book.counts) == MAX_NAMES + 1
    assert book.counts.total() == 1000 + MAX_PER_BODY
