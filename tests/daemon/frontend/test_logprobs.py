from pathlib import Path
from typing import Any

import httpx
import pytest

from daemon.generation import Delta
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason, TokenLogprobs
from tests.daemon.frontend.http_calls import (
    CHAT,
    COMPLETIONS,
    HELLO,
    HI_CHAT,
    LIMITS,
    REPLY,
    answer,
    chunks,
)
from tests.daemon.frontend.http_service import Service
from tests.daemon.small_tokenizers import load, sentence_piece_directory


async def test_echo_comes_before_the_answer(http: httpx.AsyncClient) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"echo": True})
    assert content["choices"][0]["text"] == "hello" + REPLY


async def test_an_echoed_stream_begins_with_the_prompt(http: httpx.AsyncClient) -> None:
    events = await chunks(http, COMPLETIONS, HELLO | {"echo": True, "prompt": ["hello", "world"]})
    starts = [next(e for e in events if e["choices"][0]["index"] == k) for k in range(2)]
    assert starts[0]["choices"][0]["text"].startswith("hello")
    assert starts[1]["choices"][0]["text"].startswith("world")


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "prompt": "世界 hello"}])
async def test_offsets_point_into_the_text_F8(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
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


async def test_every_token_has_its_log_probability_B15_B16(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"logprobs": 2})
    logprobs = content["choices"][0]["logprobs"]
    num_tokens = content["usage"]["completion_tokens"]
    assert {len(values) for values in logprobs.values()} == {num_tokens}
    assert logprobs["tokens"][0] == tokenizer.token_text(tokenizer.encode(REPLY)[0])
    assert logprobs["token_logprobs"][0] == -0.5
    assert len(logprobs["top_logprobs"][0]) == 2


async def test_echoed_log_probabilities_cover_the_prompt_with_nothing_for_its_first_token_F8(
    http: httpx.AsyncClient,
) -> None:
    content = await answer(http, COMPLETIONS, HELLO | {"logprobs": 1, "echo": True})
    logprobs = content["choices"][0]["logprobs"]
    usage = content["usage"]
    assert {len(values) for values in logprobs.values()} == {usage["total_tokens"]}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert None not in logprobs["token_logprobs"][1:]


@pytest.mark.parametrize("more", [{"n": 2}, {"echo": True, "n": 2, "prompt": ["hello", "a fox"]}])
async def test_streamed_log_probabilities_join_to_the_whole_ones_B16_F8(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    body = HELLO | {"logprobs": 2} | more
    whole = await answer(http, COMPLETIONS, body)
    joined: list[dict[str, list[Any]]] = [{} for _ in whole["choices"]]
    for event in await chunks(http, COMPLETIONS, body):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[event["choices"][0]["index"]].setdefault(name, []).extend(values)
    assert joined == [choice["logprobs"] for choice in whole["choices"]]


async def test_a_prompt_is_scored_without_a_token_drawn_F8(
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


async def test_a_bos_has_no_text_in_an_echo_F8(tmp_path: Path) -> None:
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
