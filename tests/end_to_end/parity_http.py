"""All features asked over HTTP, one after the other or all at once, and answers compared."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from daemon.generation import GenerationSpec
from tests.end_to_end.parity_features import FEATURES, PROMPTS, request
from tests.end_to_end.service import Service

SAMPLING = (
    *("max_tokens", "min_tokens", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
ASKED = [(feature, which) for feature in FEATURES for which in range(len(PROMPTS))]
TOGETHER = 16

Choice = dict[str, Any]
Answers = dict[str, list[Choice]]
"""By feature: the choices for each prompt."""


def body_of(asked: GenerationSpec) -> dict[str, Any]:
    sampling = msgspec.to_builtins(asked.sampling)
    wanted = asked.sampling.logprobs
    return {
        **{name: sampling[name] for name in SAMPLING if sampling[name] is not None},
        "prompt": list(asked.prompt),
        "n": asked.num_choices,
        "stop": list(asked.stop),
        "stop_token_ids": list(asked.sampling.end_token_ids),
        "logit_bias": {str(token): bias for token, bias in asked.sampling.logit_bias},
        "logprobs": asked.prompt_logprobs if wanted is None else wanted,
        "echo": asked.prompt_logprobs is not None,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def choices_of(client: httpx.Client, feature: str, which: int) -> list[Choice]:
    body = body_of(request(feature, PROMPTS[which]))
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, (feature, response.text)
    choices: list[Choice] = response.json()["choices"]
    return sorted(choices, key=lambda choice: int(choice["index"]))


def one_by_one(service: Service) -> Answers:
    with service.client() as client:
        return _gathered([choices_of(client, *asked) for asked in ASKED])


@contextmanager
def all_at_once(service: Service) -> Iterator[Callable[[], Answers]]:
    """They are under way while the body runs; yields what waits for them."""
    with (
        httpx.Client(base_url=service.url, timeout=240.0) as client,
        ThreadPoolExecutor(TOGETHER) as threads,
    ):
        under_way = [threads.submit(choices_of, client, *asked) for asked in ASKED]
        yield lambda: _gathered([one.result() for one in under_way])


def assert_same(given: Answers, expected: Answers, tolerance: float) -> None:
    """The same in all but what log probabilities round to."""
    assert given.keys() == expected.keys()
    for feature, choices in expected.items():
        for ours, theirs in zip(given[feature], choices, strict=True):
            for field in ("index", "text", "token_ids", "finish_reason"):
                assert ours[field] == theirs[field], (feature, field)
            assert_alike(ours["logprobs"], theirs["logprobs"], tolerance)


def assert_alike(
    given: dict[str, Any] | None, expected: dict[str, Any] | None, tolerance: float
) -> None:
    if given is None or expected is None:
        assert given is expected
        return
    for field in ("tokens", "text_offset"):
        assert given[field] == expected[field]
    assert _numbers(given["token_logprobs"]) == _near(expected["token_logprobs"], tolerance)
    tops = [
        [sorted((top or {}).values()) for top in of["top_logprobs"]] for of in (given, expected)
    ]
    for ours, theirs in zip(*tops, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


def _gathered(answers: list[list[Choice]]) -> Answers:
    found: Answers = {feature: [] for feature in FEATURES}
    for (feature, _), choices in zip(ASKED, answers, strict=True):
        found[feature] += choices
    return found


def _ranked(top: dict[str, float] | None) -> list[float]:
    return sorted((top or {}).values())


def _numbers(values: list[float | None]) -> list[float]:
    """Nothing is known of a prompt's first token."""
    return [1.0 if value is None else value for value in values]


def _near(values: list[float | None], tolerance: float) -> Any:
    return pytest.approx(_numbers(values), abs=tolerance)
