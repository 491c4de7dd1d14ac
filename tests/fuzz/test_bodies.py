"""What HTTP clients send: whatever it is, a call that can be served or a refusal of ours."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.errors import InvalidRequest, ServeError
from daemon.frontend.calls import Call, plan_chat, plan_completion
from daemon.frontend.json_shape import check_shape
from daemon.frontend.schema import ChatBody, CompletionBody, read_body
from daemon.frontend.served_model import ServedModel
from tests.daemon.frontend.planned_calls import max_output, served
from tests.daemon.small_tokenizers import byte_level_directory
from tests.fuzz.documents import BOMBS, LEAVES, VALUES, dumped, noise, spoiled
from tests.fuzz.strict_read import peak_bytes, strict_read

FULL = {
    "model": "tiny",
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "logit_bias": {"7": 1.5},
    "seed": 3,
    "n": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [9],
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "me",
}
COMPLETIONS = [
    FULL | {"prompt": "hello", "echo": True, "logprobs": 2},
    {"prompt": ["hello", "world"]},
    {"prompt": [5, 6, 7], "stream": False},
    {"prompt": [[5], [6, 7]], "best_of": 1},
]
CHATS = [
    FULL | {"messages": [{"role": "user", "content": "hi", "name": "me"}]},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": ""},
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"mood": ["calm", {"very": 1}]},
        "max_completion_tokens": 9,
    },
]
FIELDS = sorted(
    {f.name for kind in (CompletionBody, ChatBody) for f in msgspec.structs.fields(kind)}
    | {"tools", "response_format", "suffix", "guided_regex", "kv_transfer_params"}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(byte_level_directory(tmp_path_factory.mktemp("fuzz") / "model"))


def planned(raw: bytes, kind: Any, model: ServedModel) -> Call:
    """The whole way of a body to what the controller is given."""
    check_shape(raw)
    body = read_body(raw, kind)
    plan = plan_completion if kind is CompletionBody else plan_chat
    return asyncio.run(plan(body, model, max_output))


def check(raw: bytes, model: ServedModel) -> None:
    """On either endpoint: refused by the client's own mistake, or ready to be served."""
    for kind in (CompletionBody, ChatBody):
        call = strict_read(lambda kind=kind: planned(raw, kind, model), ServeError)
        if call is None:
            continue
        for spec in call.specs:
            sampling = spec.sampling
            assert spec.prompt
            assert all(0 <= t < model.tokenizer.num_token_ids for t in spec.prompt)
            assert 0 <= sampling.min_tokens <= sampling.max_tokens <= 256 - len(spec.prompt)
            assert 0 <= sampling.seed < 2**63
            assert 1 <= spec.num_choices <= 16
            json.dumps(msgspec.to_builtins(sampling), allow_nan=False)


@given(st.one_of(noise(), spoiled(*COMPLETIONS, *CHATS)))
def test_a_body_becomes_a_call_or_is_refused_E12_E25(model: ServedModel, raw: bytes) -> None:
    check(raw, model)


@given(st.sampled_from([*COMPLETIONS, *CHATS]), st.sampled_from(FIELDS), st.one_of(LEAVES, VALUES))
def test_whatever_a_field_holds_it_means_something_or_is_refused(
    model: ServedModel, body: dict[str, Any], field: str, value: Any
) -> None:
    check(dumped(body | {field: value}), model)


@given(st.one_of(noise(), spoiled(*COMPLETIONS, *CHATS)))
def test_who_is_refused_is_told_so_in_one_short_sentence(raw: bytes) -> None:
    try:
        read_body(raw, CompletionBody)
    except InvalidRequest as refusal:
        told = refusal
    else:
        return
    assert told.status == 400
    assert told.message.isprintable()
    assert len(told.message) < 300


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:8])
@pytest.mark.parametrize("field", [b"prompt", b"messages", b"chat_template_kwargs", b"next_year"])
def test_no_body_takes_long_or_makes_much_more_memory_of_itself_E25(
    model: ServedModel, field: bytes, bomb: bytes
) -> None:
    plain = b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"'
    raw = plain + field + b'":' + bomb + b"}"
    for kind in (CompletionBody, ChatBody):
        peak = peak_bytes(lambda kind=kind: planned(raw, kind, model), ServeError)
        assert peak < 100 * len(raw) + (1 << 20)


@pytest.mark.parametrize("value", [b"[],", b"{},", b'"a",', b"1.5,", b"null,", b'{"a":1},'])
def test_eight_mebibytes_of_small_values_are_read_or_refused_within_a_second_E25(
    model: ServedModel, value: bytes
) -> None:
    many = value * ((8 << 20) // len(value)) + value[:-1]
    for head in (b'{"prompt":[', b'{"prompt":"x","next_year":[', b'{"messages":['):
        raw = head + many + b"]}"
        for kind in (CompletionBody, ChatBody):
            strict_read(lambda raw=raw, kind=kind: planned(raw, kind, model), ServeError)
