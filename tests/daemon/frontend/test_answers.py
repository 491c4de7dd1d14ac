import httpx

from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, HI_CHAT, REPLY, answer


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


async def test_a_text_ends_before_its_stop_string_F7(http: httpx.AsyncClient) -> None:
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
