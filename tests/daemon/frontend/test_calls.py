import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.chat_template import ChatTemplate
from daemon.errors import InvalidRequest, PromptTooLong
from daemon.frontend.calls import Dialect, plan_completion
from daemon.frontend.schema import CompletionBody, read_body
from daemon.frontend.served_model import ServedModel
from daemon.text import Tokenizer
from tests.daemon.frontend.planned_calls import USER, chat, completion, served, spec_of
from tests.daemon.small_tokenizers import byte_level_directory

# Prompts


async def test_a_prompt_may_be_text(model: ServedModel) -> None:
    assert list((await spec_of(model)).prompt) == model.tokenizer.encode("hello")


async def test_a_prompt_may_be_several_texts(model: ServedModel) -> None:
    call = await completion(model, prompt=["hello", "world"])
    assert [len(spec.prompt) > 0 for spec in call.specs] == [True, True]


async def test_a_prompt_may_be_token_ids(model: ServedModel) -> None:
    assert (await spec_of(model, prompt=[5, 6, 7])).prompt == (5, 6, 7)


async def test_a_prompt_may_be_several_lists_of_token_ids(model: ServedModel) -> None:
    call = await completion(model, prompt=[[5, 6], [7]])
    assert [spec.prompt for spec in call.specs] == [(5, 6), (7,)]


@pytest.mark.parametrize("prompt", ["", [""], [[]]])
async def test_an_empty_prompt_is_the_models_own_beginning_E1(
    model_with_bos: ServedModel, prompt: Any
) -> None:
    assert (await spec_of(model_with_bos, prompt=prompt)).prompt == (
        model_with_bos.tokenizer.bos_id,
    )


async def test_a_text_gets_the_models_bos(model_with_bos: ServedModel) -> None:
    assert (await spec_of(model_with_bos)).prompt[0] == model_with_bos.tokenizer.bos_id


async def test_a_chat_gets_no_bos_but_the_templates(model_with_bos: ServedModel) -> None:
    assert model_with_bos.tokenizer.bos_id not in (await chat(model_with_bos)).specs[0].prompt


async def test_a_chat_is_put_into_the_models_format(model: ServedModel) -> None:
    prompt = (await chat(model)).specs[0].prompt
    assert model.tokenizer.decode(prompt, skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_parts_of_a_message_are_joined_E24(model: ServedModel) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = (await chat(model, messages=[{"role": "user", "content": parts}])).specs[0].prompt
    assert "one\ntwo" in model.tokenizer.decode(prompt)


async def test_a_developer_is_the_system(model: ServedModel) -> None:
    call = await chat(model, messages=[{"role": "developer", "content": "x"}])
    assert call.specs[0].prompt == (
        (await chat(model, messages=[{"role": "system", "content": "x"}])).specs[0].prompt
    )


async def test_the_assistant_may_have_the_last_word_E24(model: ServedModel) -> None:
    call = await chat(model, messages=[USER, {"role": "assistant", "content": "Hi"}])
    assert model.tokenizer.decode(call.specs[0].prompt).endswith("Hi\nassistant\n")


async def test_a_model_without_a_chat_format_takes_no_chats(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        await chat(served(byte_level_directory(tmp_path / "m"), template=None))


async def test_a_chat_template_gets_the_clients_variables(tmp_path: Path) -> None:
    model = served(byte_level_directory(tmp_path / "m"), template="{{ mood }}")
    call = await chat(model, chat_template_kwargs={"mood": "calm"})
    assert model.tokenizer.decode(call.specs[0].prompt) == "calm"


class UntouchedTokenizer(Tokenizer):
    """Must not be asked."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        raise AssertionError("tokenised")


@pytest.fixture
def untouched(tmp_path: Path) -> ServedModel:
    model = served(byte_level_directory(tmp_path / "m"))
    return msgspec.structs.replace(
        model, tokenizer=UntouchedTokenizer.from_directory(tmp_path / "m")
    )


@pytest.mark.parametrize("prompt", ["x" * 5_000_000, [-1] * 300_000, [[5], [-1] * 257]])
async def test_a_prompt_far_too_long_is_refused_before_it_is_looked_at_D5_E3(
    untouched: ServedModel, prompt: Any
) -> None:
    with pytest.raises(PromptTooLong, match="maximum context length is 256 tokens") as refusal:
        await completion(untouched, prompt=prompt)
    assert refusal.value.param == "prompt"


async def test_a_chat_far_too_long_is_refused_before_it_is_tokenised_D5(
    untouched: ServedModel,
) -> None:
    with pytest.raises(PromptTooLong) as refusal:
        await chat(untouched, messages=[{"role": "user", "content": "x" * 5_000_000}])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("num_prompt", [256, 257, 1000])
async def test_a_prompt_that_leaves_no_room_is_refused_by_its_length_and_the_limit_E3(
    model: ServedModel, num_prompt: int
) -> None:
    with pytest.raises(PromptTooLong) as refusal:
        await completion(model, prompt=[5] * num_prompt)
    assert refusal.value.message.startswith(
        "This model's maximum context length is 256 tokens. However, you requested "
        f"{num_prompt + 1} tokens ({num_prompt} in the prompt, 1 for the completion)."
    )


async def test_a_chat_that_leaves_no_room_is_refused_by_the_name_of_its_field(
    model: ServedModel,
) -> None:
    with pytest.raises(PromptTooLong) as refusal:
        await chat(model, messages=[USER] * 100)
    assert refusal.value.param == "messages"


class WatchedTemplate(ChatTemplate):
    """Notes the threads in which it is rendered."""

    def __init__(self) -> None:
        super().__init__("hello")
        self.threads: set[int] = set()

    def render(self, *messages: Any, **how: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().render(*messages, **how)


async def test_many_messages_of_few_letters_are_rendered_beside_the_event_loop_D5(
    model: ServedModel,
) -> None:
    """Two hundred thousand empty messages once held up everybody for half a second."""
    template = WatchedTemplate()
    watched = msgspec.structs.replace(model, chat_template=template)
    await chat(watched, messages=[{"role": "user", "content": ""}] * 1000)
    assert template.threads
    assert threading.get_ident() not in template.threads


async def test_a_long_text_makes_the_same_tokens_in_its_thread(model: ServedModel) -> None:
    text = "hello world " * 1000
    roomy = msgspec.structs.replace(model, max_context=8192)
    body = read_body(json.dumps({"prompt": text}).encode(), CompletionBody)
    call = await plan_completion(body, roomy, lambda _: 1)
    assert list(call.specs[0].prompt) == model.tokenizer.encode(text)


@pytest.mark.parametrize("how", [{"n": 3, "logprobs": 2}, {"stop": "x", "seed": -1}])
async def test_both_endpoints_take_the_same_way_B17(
    model: ServedModel, how: dict[str, Any]
) -> None:
    """A chat is its prompt: what follows cannot tell which endpoint it came by."""
    of_chats = {"logprobs": True, "top_logprobs": how["logprobs"]} if "logprobs" in how else {}
    (chatted,) = (await chat(model, **{"seed": 1, "max_tokens": 5} | how | of_chats)).specs
    plain = await spec_of(model, prompt=list(chatted.prompt), **{"seed": 1, "max_tokens": 5} | how)
    assert plain == chatted


# Lengths


async def test_a_completion_has_sixteen_tokens_unless_told(model: ServedModel) -> None:
    assert (await spec_of(model)).sampling.max_tokens == 16


async def test_a_chat_has_whatever_fits_unless_told(model: ServedModel) -> None:
    (spec,) = (await chat(model)).specs
    assert spec.sampling.max_tokens == 256 - len(spec.prompt)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_huge_length_is_capped_to_what_fits_E4(model: ServedModel, field: str) -> None:
    (spec,) = (await chat(model, **{field: 10**9})).specs
    assert spec.sampling.max_tokens == 256 - len(spec.prompt)


async def test_the_newer_name_of_the_length_counts(model: ServedModel) -> None:
    call = await chat(model, max_tokens=5, max_completion_tokens=7)
    assert call.specs[0].sampling.max_tokens == 7


async def test_a_prompt_may_be_scored_without_a_token_drawn(model: ServedModel) -> None:
    spec = await spec_of(model, max_tokens=0, echo=True, logprobs=2)
    assert (spec.sampling.max_tokens, spec.prompt_logprobs) == (0, 2)


async def test_min_tokens_is_capped_with_the_length(model: ServedModel) -> None:
    spec = await spec_of(model, prompt=[5] * 250, max_tokens=100, min_tokens=50)
    assert spec.sampling.min_tokens == 6


# Sampling


async def test_every_sampling_field_arrives(model: ServedModel) -> None:
    fields = {
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "max_tokens": 9,
        "logprobs": 3,
    }
    sampling = (await spec_of(model, **fields)).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields


@pytest.mark.parametrize("top_k", [0, -1])
async def test_a_top_k_of_nothing_is_none(model: ServedModel, top_k: int) -> None:
    assert (await spec_of(model, top_k=top_k)).sampling.top_k is None


async def test_a_tiny_temperature_is_greedy(model: ServedModel) -> None:
    assert (await spec_of(model, temperature=1e-9)).sampling.is_greedy


async def test_logit_bias_is_by_token_id(model: ServedModel) -> None:
    spec = await spec_of(model, logit_bias={"7": -100, "3": 1.5})
    assert spec.sampling.logit_bias == ((3, 1.5), (7, -100.0))


async def test_without_a_seed_every_prompt_gets_one(model: ServedModel) -> None:
    call = await completion(model, prompt=["a", "b"])
    seeds = {spec.sampling.seed for spec in call.specs}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_negative_seed_is_a_seed(model: ServedModel) -> None:
    assert (await spec_of(model, seed=-1)).sampling.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (3,)),
        ({"ignore_eos": True}, ()),
        ({"stop_token_ids": [9, 3]}, (3, 9)),
        ({"ignore_eos": True, "stop_token_ids": [9]}, (9,)),
    ],
)
async def test_a_choice_ends_by_the_models_tokens_and_the_clients(
    model: ServedModel, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert (await spec_of(model, **fields)).sampling.end_token_ids == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("", ()), ([""], ()), ([], ()), (None, ()), ("a", ("a",)), (["a", "", "b"], ("a", "b"))],
)
async def test_empty_stop_strings_stop_nothing_E21(
    model: ServedModel, stop: Any, expected: tuple[str, ...]
) -> None:
    assert (await spec_of(model, stop=stop)).stop == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
async def test_a_chat_asks_for_log_probabilities_in_two_fields(
    model: ServedModel, fields: dict[str, Any], expected: int | None
) -> None:
    assert (await chat(model, **fields)).specs[0].sampling.logprobs == expected


async def test_echo_repeats_a_text_as_it_came(model: ServedModel) -> None:
    call = await completion(model, prompt=["hello <|im_end|>", "世界"], echo=True)
    assert call.echoes == ("hello <|im_end|>", "世界")


async def test_echo_turns_token_ids_into_their_text(model: ServedModel) -> None:
    call = await completion(model, prompt=model.tokenizer.encode("hello world"), echo=True)
    assert call.echoes == ("hello world",)


async def test_a_call_knows_how_it_is_to_be_told(model: ServedModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = await chat(model, stream=True, stream_options=options, return_timing=True, n=3)
    assert (call.dialect, call.stream, call.include_usage) == (Dialect.CHAT, True, True)
    assert (call.continuous_usage, call.return_timing, call.num_choices) == (True, True, 3)


async def test_an_answer_of_gigabytes_is_not_asked_for_by_a_small_request(
    model: ServedModel,
) -> None:
    how = {"echo": True, "logprobs": 20, "max_tokens": 0, "n": 16}
    with pytest.raises(InvalidRequest, match="log probabilities; 1000000 are the most"):
        await completion(model, prompt=[[5] * 200] * 30, **how)


async def test_nor_by_tokens_that_each_tell_many_others_E20(model: ServedModel) -> None:
    """Each entry takes some hundred bytes until the answer has left."""
    roomy = msgspec.structs.replace(model, max_context=1 << 20)
    how = {"prompt": [[5]] * 64, "n": 16, "max_tokens": 10**6}
    for fields, most in (({"logprobs": 20}, 46), ({"logprobs": 0}, 976), ({}, 1000)):
        body = read_body(json.dumps(how | fields).encode(), CompletionBody)
        call = await plan_completion(body, roomy, lambda _: 1000)
        assert {spec.sampling.max_tokens for spec in call.specs} == {most}


async def test_a_templates_own_variables_cannot_be_replaced_by_a_client(
    model: ServedModel,
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = await chat(model, messages=messages)
    kwargs = {"bos_token": "n" * 1000, "eos_token": "e" * 1000}
    assert (await chat(model, messages=messages, chat_template_kwargs=kwargs)).specs[0].prompt == (
        plain.specs[0].prompt
    )
