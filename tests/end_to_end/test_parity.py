"""The same prompts get transformers' greedy tokens in every topology, batched or alone, streamed
or not, through the official client; and the work is really split between the workers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.end_to_end.reference import NUM_OUTPUT, PROMPTS, Reference
from tests.end_to_end.service import Service, eventually, serving
from tests.gpu_workers.checkpoints import CHECKPOINTS

TOPOLOGIES = {
    "1P+1D": ("--prefill", "1", "--decode", "1"),
    "mixed": ("--prefill", "0", "--decode", "0", "--mixed", "1"),
    "2P+2D": ("--prefill", "2", "--decode", "2"),
}


# The real model crawls on two cores; tiny models take every topology every time.
SLOW = {"mixed", "2P+2D"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TOPOLOGIES],
)
def service(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[Service]:
    flags = (*TOPOLOGIES[request.param], "--dtype", "float32", "--kv-cache-gib", "0.25")
    with serving(smollm2, *flags) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=120) as one:
        yield one


def greedy(client: openai.OpenAI, prompt: object) -> list[openai.types.CompletionChoice]:
    answer = client.completions.create(
        model="smollm2",
        prompt=prompt,  # type: ignore[arg-type]
        max_tokens=NUM_OUTPUT,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return sorted(answer.choices, key=lambda choice: choice.index)


def greedy_stream(client: openai.OpenAI, prompt: str) -> str:
    stream = client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=NUM_OUTPUT,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream)


def test_greedy_tokens_are_those_of_transformers_F18(
    client: openai.OpenAI, smollm2_reference: Reference, first_answers: dict[str, list[str]]
) -> None:
    """In fp32, by teacher forcing: each token is the argmax of transformers' logits after all
    before it. That is what transformers' own greedy search would have drawn, token by token."""
    batch = greedy(client, list(PROMPTS))
    texts = [choice.text for choice in batch]
    if "greedy" not in first_answers:  # the other topologies must answer the very same
        tokenizer = smollm2_reference.tokenizer
        outputs = [list(choice.token_ids) for choice in batch]
        assert {len(output) for output in outputs} == {NUM_OUTPUT}
        assert texts == [tokenizer.decode(output) for output in outputs]
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        assert smollm2_reference.shortfalls(prompts, outputs) == [0.0] * len(PROMPTS)
    assert first_answers.setdefault("greedy", texts) == texts
    ids = smollm2_reference.tokenizer.encode(PROMPTS[5])
    assert [choice.text for choice in greedy(client, ids)] == [texts[5]]  # alone
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: greedy_stream(client, p), PROMPTS[:4])) == texts[:4]


# In one process and every topology, all of them run each time (test_families).
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama-gqa")) for name in CHECKPOINTS],
)
def test_each_family_is_served_with_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    reference = Reference(CHECKPOINTS[name](tmp_path / name))
    prompts = [reference.tokenizer.encode(prompt) for prompt in PROMPTS]
    with serving(reference.directory, "--dtype", "float32", "--kv-cache-gib", "0.05") as running:
        answer = running.complete(
            prompts, max_tokens=NUM_OUTPUT, ignore_eos=True, return_token_ids=True
        )
    choices: list[dict[str, Any]] = answer["choices"]  # type: ignore[assignment]
    outputs = [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])]
    assert {len(output) for output in outputs} == {NUM_OUTPUT}
    assert reference.shortfalls(prompts, outputs) == [0.0] * len(PROMPTS)


def test_the_work_is_split_for_real_A19_A20_B14(service: Service, client: openai.OpenAI) -> None:
    before = service.counts()
    client.completions.create(
        model="smollm2", prompt=list(PROMPTS[:6]), max_tokens=4, temperature=0
    )
    client.completions.create(model="smollm2", prompt=PROMPTS[0], max_tokens=1)
    eventually(lambda: service.is_all_free, 20, "all blocks free")
    after = service.counts()

    def gained(role: str, count: str) -> float:
        names = [name for name in after if name.startswith(role)]
        return sum(after[n][count] - before[n][count] for n in names)

    if "mixed-0" in after:
        assert gained("mixed", "num_pulls") == 0
        return
    assert gained("decode", "prefill_tokens") == 0
    assert gained("prefill", "decode_steps") == 0
    assert gained("decode", "num_pulls") == 6
    assert gained("decode", "decode_tokens") == 6 * 3
    if "prefill-1" in after:
        for name in ("prefill-1", "decode-1"):
            assert after[name]["num_steps"] > before[name]["num_steps"]


def test_seeded_choices_are_the_same_everywhere_and_differ_among_themselves_F17_F19(
    client: openai.OpenAI, first_answers: dict[str, list[str]]
) -> None:
    answer = client.completions.create(
        model="smollm2", prompt=PROMPTS[1], max_tokens=24, temperature=0.9, top_p=0.95, seed=7, n=3
    )
    texts = [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]
    assert len(set(texts)) == 3
    assert first_answers.setdefault("seeded", texts) == texts


@pytest.fixture(scope="session")
def first_answers() -> dict[str, list[str]]:
    """What the first topology answered; the others must answer the same."""
    return {}


def test_joined_stream_equals_the_whole_text_for_chinese_and_emoji_F1(
    client: openai.OpenAI,
) -> None:
    messages = [{"role": "user", "content": "请用中文和表情符号🎉🐍介绍你自己。"}]
    how = {"model": "smollm2", "messages": messages, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**how)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**how, stream=True)  # type: ignore[call-overload]
    joined = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert joined == whole.choices[0].message.content
