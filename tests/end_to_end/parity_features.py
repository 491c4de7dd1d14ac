"""Every sampling and output feature, as requests, and what a client has of each answer.

Prompts and seeds are such that the terse model draws nothing near a tie: neither a batch of another
shape nor 16 bit in place of 32 makes it say anything else (`is_decided`, and a test holds it).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from daemon.generation import Delta, GenerationSpec
from gpu_workers.sampler import Draw, draw_tokens
from ipc.vocabulary import SamplingParams, TokenLogprobs
from tests.end_to_end.reference import Reference
from tests.end_to_end.town import Client
from tests.gpu_workers.checkpoints import EOS, NUM_TOKEN_IDS

PROMPTS = (
    list(b"One grey owl hides from the key."),
    list(b"24, 25, 26, 27, 29, 32, 37, 45, 58"),
)
SEED = 18
NUM_SHIFTS = 16
Logprobs = Sequence[TokenLogprobs | None]


def spec(**how: object) -> dict[str, object]:
    """Of a request; what is none of GenerationSpec's own fields is about sampling."""
    own = {key: how.pop(key) for key in GenerationSpec.__struct_fields__ if key in how}
    return own | {"sampling": SamplingParams(**{"max_tokens": 12, "seed": SEED} | how)}  # type: ignore[arg-type]


FEATURES = {
    "greedy": spec(temperature=0.0),
    "seeded": spec(),
    "temperature": spec(temperature=1.7, seed=7),
    "top_p": spec(top_p=0.6, seed=5),
    "top_k": spec(top_k=5, seed=5),
    "min_p": spec(min_p=0.1, seed=8),
    "presence_penalty": spec(temperature=0.0, presence_penalty=1.5),
    "frequency_penalty": spec(temperature=0.0, frequency_penalty=1.2),
    "repetition_penalty": spec(temperature=0.0, repetition_penalty=1.4),
    "logit_bias": spec(logit_bias=((98, 2.0), (103, 2.0), (99, -100.0))),
    "end tokens": spec(end_token_ids=(EOS, *range(0, 256, 5))),
    "min_tokens": spec(min_tokens=6, end_token_ids=(EOS, *range(0, 256, 5))),
    "stop strings": spec(logit_bias=((101, 9.0), (102, 9.0)), stop=("eff", "fee"), seed=7),
    "logprobs": spec(logprobs=4),
    "logprobs of the drawn alone": spec(temperature=0.0, logprobs=0),
    "choices": spec(num_choices=3),
    "choices with logprobs": spec(num_choices=3, logprobs=2, presence_penalty=0.7, seed=29),
    "one token": spec(max_tokens=1, num_choices=2, seed=5),
    "echo with logprobs": spec(prompt_logprobs=2, logprobs=2),
    "the prompt alone": spec(max_tokens=0, prompt_logprobs=1),
}


def request(feature: str, prompt: Sequence[int]) -> GenerationSpec:
    return GenerationSpec(prompt=tuple(prompt), **FEATURES[feature])  # type: ignore[arg-type]


class Answer(NamedTuple):
    """All that a client has of one choice."""

    text: str
    token_ids: list[int]
    finished: list[str]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]


def answers_of(client: Client) -> Iterator[Answer]:
    assert client.error is None
    for choice in range(client.specs[0].num_choices):
        deltas: list[Delta] = [delta for delta in client.deltas if delta.choice == choice]
        yield Answer(
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            finished=[delta.finished.value for delta in deltas if delta.finished],
            logprobs=[entry for delta in deltas for entry in delta.logprobs or ()],
            prompt_logprobs=[entry for delta in deltas for entry in delta.prompt_logprobs or ()],
        )


def assert_features_matter(answers: dict[str, list[Answer]]) -> None:
    """Each changes what it is to change."""
    texts = {name: tuple(answer.text for answer in given) for name, given in answers.items()}
    same_as_seeded = {"seeded", "logprobs", "echo with logprobs"}
    assert {name for name in texts if texts[name] == texts["seeded"]} == same_as_seeded
    assert "stop" in {a.finished[0] for a in answers["stop strings"]}
    assert "stop" in {a.finished[0] for a in answers["end tokens"]}
    assert len({a.text for a in answers["choices"]}) == 3 * len(PROMPTS)
    assert all(len(a.logprobs) == len(a.token_ids) for a in answers["logprobs"])
    prompts = [len(prompt) for prompt in PROMPTS]
    assert [len(a.prompt_logprobs) for a in answers["echo with logprobs"]] == prompts
    assert [len(a.prompt_logprobs) for a in answers["the prompt alone"]] == prompts


def assert_same(given: Answer, expected: Answer, tolerance: float) -> None:
    """The same in all but what log probabilities round to."""
    assert given[:2] == expected[:2]
    assert given.finished == expected.finished
    assert len(given.finished) == 1
    assert_alike(given.logprobs, expected.logprobs, tolerance)
    assert_alike(given.prompt_logprobs, expected.prompt_logprobs, tolerance)


def assert_alike(given: Logprobs, expected: Logprobs, tolerance: float) -> None:
    """Of the likeliest, those whose lead over the next is large enough are the same."""
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in other.top], abs=tolerance
        )
        assert leaders(one, 3 * tolerance) == leaders(other, 3 * tolerance)


def leaders(entry: TokenLogprobs, lead: float) -> list[int]:
    """Ids of the likeliest, as far as each leads the next one told by that much."""
    found = []
    for (token, value), (_, following) in zip(entry.top, entry.top[1:], strict=False):
        if value - following < lead:
            break
        found.append(token)
    return found


def is_decided(
    reference: Reference, asked: GenerationSpec, answers: Sequence[Answer], noise: float
) -> bool:
    """Whether every token leads so clearly that logits with that much noise draw it, too."""
    if not asked.sampling.max_tokens:
        return True
    prompt = list(asked.prompt)
    rows = [prompt + answer.token_ids for answer in answers]
    longest = max(map(len, rows))
    with torch.inference_mode():
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = reference.model(padded).logits
    generator = torch.Generator().manual_seed(0)
    for choice, row in enumerate(rows):
        due = logits[choice, len(prompt) - 1 : len(row) - 1]
        draws = [
            Draw(i, asked.sampling, choice, row[: len(prompt) + i], len(prompt))
            for i in range(len(due))
        ]
        for _ in range(NUM_SHIFTS):
            shifted = due + noise * torch.randn(due.shape, generator=generator)
            drawn = [d.token_id for d in draw_tokens(shifted, draws, NUM_TOKEN_IDS)]
            if drawn != row[len(prompt) :]:
                return False
    return True
