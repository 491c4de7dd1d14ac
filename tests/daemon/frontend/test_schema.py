from typing import Any

import pytest

from daemon.errors import InvalidJson, InvalidRequest, UnsupportedParameter
from daemon.frontend.schema import CompletionBody, read_body
from daemon.frontend.served_model import ServedModel
from tests.daemon.frontend.planned_calls import USER, chat, completion, spec_of

BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -5),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 10**6),
    ("n", True),
    ("n", 2**70),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "x"),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("seed", "x"),
    ("stop", 3),
    ("stop", "x" * 257),
    ("stop", ["x"] * 17),
    ("stop", {"a": 1}),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "3"),
    ("logit_bias", {"191222": -100}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("stream", "false"),
    ("stream", 1),
    ("ignore_eos", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", "usage"),
    ("model", 5),
    ("return_timing", "yes"),
]


@pytest.mark.parametrize("plan", [completion, chat])
@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
async def test_a_bad_value_is_refused_by_the_name_of_its_field(
    model: ServedModel, plan: Any, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await plan(model, **{field: value})
    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, 2, 10**6]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"stop": ["x", "y" * 257]}, "stop[1]"),
        ({"stop": [None]}, "stop[0]"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ],
)
async def test_a_bad_completion_is_refused_by_the_name_of_its_field(
    model: ServedModel, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await completion(model, **fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_a_bad_chat_is_refused_by_the_name_of_its_field(
    model: ServedModel, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await chat(model, **fields)
    assert refusal.value.param == (param or "messages[0].content[0].text")


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
async def test_a_message_that_is_no_text_is_not_supported(model: ServedModel, part: str) -> None:
    content = [{"type": "text", "text": "what is this"}, {"type": part, part: {}}]
    with pytest.raises(UnsupportedParameter) as refusal:
        await chat(model, messages=[{"role": "user", "content": content}])
    assert refusal.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("suffix", "end"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["audio"]),
        ("logits_processors", ["x"]),
        ("guided_regex", "("),
        ("guided_json", {}),
        ("use_beam_search", True),
        ("kv_transfer_params", {"tp_size": 10**9}),
        ("priority", 1),
        ("skip_special_tokens", False),
    ],
)
async def test_what_is_known_but_not_offered_is_refused_by_name(
    model: ServedModel, field: str, value: Any
) -> None:
    with pytest.raises(UnsupportedParameter) as refusal:
        await chat(model, **{field: value})
    assert refusal.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"audio": None, "modalities": ["text"], "suffix": None, "priority": 0},
        {"user": "me", "store": False, "metadata": {}, "a_field_of_next_year": [1]},
        {"temperature": None, "n": None, "stop": None, "seed": None, "stream": None},
    ],
)
async def test_neutral_and_unknown_fields_change_nothing(
    model: ServedModel, fields: dict[str, Any]
) -> None:
    plain = await chat(model, seed=1)
    assert await chat(model, **({"seed": 1} | fields | {"seed": 1})) == plain


async def test_best_of_may_only_repeat_n(model: ServedModel) -> None:
    assert (await spec_of(model, n=2, best_of=2)).num_choices == 2
    with pytest.raises(UnsupportedParameter):
        await completion(model, n=2, best_of=3)


async def test_tool_messages_are_not_supported(model: ServedModel) -> None:
    with pytest.raises(UnsupportedParameter):
        await chat(model, messages=[USER, {"role": "tool", "content": "5", "tool_call_id": "x"}])


async def test_an_error_never_repeats_a_long_input(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await chat(model, messages=[{"role": "x" * 5000, "content": "a"}])
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[" * 100_000, b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}']
)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidJson):
        read_body(raw, CompletionBody)


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="The body is invalid: expected object"):
        read_body(raw, CompletionBody)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'prompt' is required"):
        read_body(b"{}", CompletionBody)
