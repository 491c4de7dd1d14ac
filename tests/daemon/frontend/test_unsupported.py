from typing import Any

import pytest

from daemon.errors import UnsupportedParameter
from daemon.frontend.served_model import ServedModel
from tests.daemon.frontend.planned_calls import USER, chat, completion


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
async def test_a_message_that_is_no_text_is_not_supported_E24(
    model: ServedModel, part: str
) -> None:
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
        ("guided_choice", ["a"]),
        ("guided_grammar", "("),
        ("structured_outputs", {"regex": "("}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "text"),
        ("tools", {}),
        ("tool_choice", {"type": "function", "function": {"name": "x"}}),
        ("suffix", 5),
        ("reasoning_effort", "high"),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 5),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("chat_template", "{{ x }}"),
        ("continue_final_message", True),
        ("use_beam_search", True),
        ("kv_transfer_params", {"tp_size": 10**9}),
        ("priority", 1),
        ("skip_special_tokens", False),
    ],
)
@pytest.mark.parametrize("plan", [completion, chat])
async def test_what_is_known_but_not_offered_is_refused_by_name_E9_E10(
    model: ServedModel, plan: Any, field: str, value: Any
) -> None:
    with pytest.raises(UnsupportedParameter) as refusal:
        await plan(model, **{field: value})
    assert (refusal.value.status, refusal.value.param) == (400, field)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"audio": None, "modalities": ["text"], "suffix": None, "priority": 0},
        {"user": "me", "store": False, "metadata": {}, "a_field_of_next_year": [1]},
        {"service_tier": "auto", "safety_identifier": "x", "parallel_tool_calls": True},
        {"stream_options": None, "logit_bias": {}, "stop": [], "stop_token_ids": [], "n": 1},
    ],
)
@pytest.mark.parametrize("plan", [completion, chat])
async def test_neutral_and_unknown_fields_change_nothing(
    model: ServedModel, plan: Any, fields: dict[str, Any]
) -> None:
    assert await plan(model, **fields, seed=1) == await plan(model, seed=1)


@pytest.mark.parametrize("plan", [completion, chat])
async def test_best_of_may_only_repeat_n(model: ServedModel, plan: Any) -> None:
    assert (await plan(model, n=2, best_of=2)).num_choices == 2
    with pytest.raises(UnsupportedParameter) as refusal:
        await plan(model, n=2, best_of=3)
    assert refusal.value.param == "best_of"


async def test_tool_messages_are_not_supported_E24(model: ServedModel) -> None:
    with pytest.raises(UnsupportedParameter):
        await chat(model, messages=[USER, {"role": "tool", "content": "5", "tool_call_id": "x"}])
