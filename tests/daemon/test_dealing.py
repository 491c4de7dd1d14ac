"""Tokens that came together are counted together, and as if each had been counted alone."""

from typing import Any

import pytest

from daemon.dealing import Deal
from daemon.generation import Delta, GenerationSpec, TokenStream
from daemon.metrics import Metrics
from daemon.request import Choice, Request
from ipc.vocabulary import SamplingParams
from tests.daemon.metric_samples import samples

GAPS = "vllm:inter_token_latency_seconds"


def request_of(num_choices: int) -> Request:
    sampling = SamplingParams(max_tokens=50, seed=1)
    spec = GenerationSpec(prompt=(1,), sampling=sampling, num_choices=num_choices)
    request = Request(spec, 1, TokenStream(num_choices), 0.0)
    text: Any = None
    request.choices = [Choice(index, text) for index in range(num_choices)]
    return request


def deal(metrics: Metrics, now_s: float, request: Request, *nums_tokens: int) -> None:
    """One step; so many tokens for each choice."""
    with Deal(metrics, now_s) as step:
        for choice, count in zip(request.choices, nums_tokens, strict=True):
            step.pass_on(request, choice, Delta(choice.index, "x", (7,) * count))


async def test_all_deltas_of_a_step_are_in_the_stream_in_their_order() -> None:
    request = request_of(3)
    deal(Metrics("tiny"), 1.0, request, 1, 1, 1)
    assert [delta.choice for delta in await anext(request.stream)] == [0, 1, 2]


def test_choices_with_different_gaps_count_each_with_its_own() -> None:
    metrics, request = Metrics("tiny"), request_of(2)
    deal(metrics, 1.0, request, 1, 0)  # the second one has its first token later
    deal(metrics, 1.5, request, 1, 1)
    deal(metrics, 1.6, request, 1, 2)  # gaps: 0.5, 0.1 and twice 0.05
    assert samples(metrics, "vllm:generation_tokens_total") == {"tiny": 6}
    assert samples(metrics, f"{GAPS}_count") == {"tiny": 4}
    assert samples(metrics, f"{GAPS}_sum")["tiny"] == pytest.approx(0.7)


def test_a_delta_without_tokens_is_passed_on_but_is_no_moment_of_a_token() -> None:
    metrics, request = Metrics("tiny"), request_of(1)
    deal(metrics, 1.0, request, 0)
    assert request.clock.first_token_s is None
    deal(metrics, 2.0, request, 1)
    deal(metrics, 3.0, request, 0)
    assert (request.clock.first_token_s, request.clock.last_token_s) == (2.0, 2.0)
    assert samples(metrics, f"{GAPS}_count") == {"tiny": 0}
