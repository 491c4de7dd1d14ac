from typing import Any

import msgspec
import pytest

from daemon.errors import InvalidJson, InvalidRequest, ServeError
from daemon.frontend.schema import ChatBody, CommonBody, CompletionBody, read_body
from daemon.frontend.served_model import ServedModel
from tests.daemon.frontend.planned_calls import USER, chat, completion, spec_of

PART = {"type": "text", "text": "x"}
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
    ("n", 1.0),
    ("n", "3"),
    ("n", []),
    ("best_of", "x"),
    ("best_of", True),
    ("best_of", 2),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "x"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 1e300),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", "x"),
    ("max_completion_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", False),
    ("seed", "x"),
    ("seed", 1.5),
    ("seed", True),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("temperature", True),
    ("temperature", []),
    ("top_p", -1e300),
    ("top_k", True),
    ("top_k", 2**70),
    ("min_p", 1.1),
    ("min_p", False),
    ("presence_penalty", "1"),
    ("frequency_penalty", {}),
    ("repetition_penalty", 101),
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
    ("logit_bias", {"": 1}),
    ("logit_bias", {"+1": 1}),
    ("logit_bias", {" 1": 1}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"\u0661": 1}),  # a digit, but not of JSON
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [1]),
    ("stream", "false"),
    ("stream", 1),
    ("ignore_eos", "yes"),
    ("add_special_tokens", 1),
    ("return_token_ids", "yes"),
    ("user", 5),
    ("metadata", []),
    ("store", "no"),
    ("service_tier", 1),
    ("safety_identifier", {}),
    ("prompt_cache_key", 1),
    ("parallel_tool_calls", "no"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", "usage"),
    ("model", 5),
    ("return_timing", "yes"),
]


@pytest.mark.parametrize("plan", [completion, chat])
@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
async def test_a_bad_value_is_refused_by_the_name_of_its_field_E7_E12_E20_E21(
    model: ServedModel, plan: Any, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await plan(model, **{field: value})
    error = refusal.value
    assert (error.status, error.param) == (400, field)
    assert field in error.message
    assert error.message.endswith(".")
    assert "\n" not in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1.0}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0, "max_completion_tokens": None}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER]}, "messages"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, 2, 10**6]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": [[None]]}, "prompt[0][0]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [[[1]]]}, "prompt[0][0]"),
        ({"prompt": [[True]]}, "prompt[0][0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1]] * 65}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"stop": ["x", "y" * 257]}, "stop[1]"),
        ({"stop": [None]}, "stop[0]"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ],
)
async def test_a_bad_completion_is_refused_by_the_name_of_its_field_E1_E12_E20(
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
        ({"messages": None}, "messages"),
        ({"messages": USER}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [["user", "hello"]]}, "messages[0]"),
        ({"messages": [USER] * 10_001}, "messages"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER | {"name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [PART] * 1001}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [PART, {"text": "x"}]}]},
            "messages[0].content[1].type",
        ),
        (
            {"messages": [{"role": "user", "content": [PART | {"type": "refusal"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [PART | {"text": None}]}]},
            "messages[0].content[0].text",
        ),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": None}, "top_logprobs"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"min_tokens": 5, "max_tokens": 9, "max_completion_tokens": 3}, "min_tokens"),
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
async def test_a_bad_chat_is_refused_by_the_name_of_its_field_E12_E20_E24(
    model: ServedModel, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await chat(model, **fields)
    assert refusal.value.param == (param or "messages[0].content[0].text")


@pytest.mark.parametrize(("plan", "body"), [(completion, CompletionBody), (chat, ChatBody)])
async def test_null_is_not_given_in_every_optional_field_E21(
    model: ServedModel, plan: Any, body: type[CommonBody]
) -> None:
    """Alone and all together; the seed is given where it is not the field in question."""
    optional = [field.name for field in msgspec.structs.fields(body) if not field.required]
    assert len(optional) > 30
    plain = await plan(model, seed=1)
    for name in set(optional) - {"seed"}:
        assert await plan(model, **{name: None}, seed=1) == plain
    assert await plan(model, **(dict.fromkeys(optional) | {"seed": 1})) == plain
    await plan(model, seed=None)


async def test_the_newer_name_of_the_length_counts_on_both_endpoints(model: ServedModel) -> None:
    """Some load generators send both names wherever they go."""
    assert (await spec_of(model, max_completion_tokens=5)).sampling.max_tokens == 5
    both = await spec_of(model, max_tokens=3, max_completion_tokens=5)
    assert both.sampling.max_tokens == 5


@pytest.mark.parametrize("word", ["a\nb", "\x1b[2J", "\u2028", "\x00"])
async def test_an_error_repeats_nothing_that_is_not_printable(
    model: ServedModel, word: str
) -> None:
    for fields in ({"model": word}, {"messages": [{"role": word, "content": "a"}]}):
        with pytest.raises(ServeError) as refusal:
            await chat(model, **fields)
        assert refusal.value.message.isprintable()


async def test_an_error_never_repeats_a_long_input(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await chat(model, messages=[{"role": "x" * 5000, "content": "a"}])
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"\xff",
        b"\xef\xbb\xbf{}",
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": "x"} {}',
        b'{"prompt": "x",}',
        b"{'prompt': 'x'}",
        b'{"prompt": "a\x00"}',
        b'{"prompt": "\xe4\xb8"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "stop": "\\udc00"}',
        b'{"\\ud800": 1}',
    ],
)
def test_what_is_not_json_is_refused_E25(raw: bytes) -> None:
    with pytest.raises(InvalidJson):
        read_body(raw, CompletionBody)


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="The body is invalid: expected object"):
        read_body(raw, CompletionBody)


def test_of_a_field_that_is_given_twice_the_last_one_counts() -> None:
    assert read_body(b'{"prompt": "x", "n": 2, "n": 3}', CompletionBody).n == 3


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'prompt' is required"):
        read_body(b"{}", CompletionBody)
