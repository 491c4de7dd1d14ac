"""Draws follow transformers' distributions, and are a pure function of what they are given."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_workers.sampler import Draw, draw_tokens, prompt_logprobs, uniform
from ipc.vocabulary import SamplingParams

VOCAB = 48
NUM_DRAWS = 20_000
SMALLEST_P = 1e-3  # seeds are fixed: this either always passes or never

LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2.5

SETTINGS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.8, "top_p": 0.95},
}


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 0, **changes})


def draw_one(
    logits: torch.Tensor,
    sampling: SamplingParams,
    *,
    choice: int = 0,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    num_token_ids: int = VOCAB,
) -> int:
    draw = Draw(0, sampling, choice, [*prompt, *output], len(prompt))
    return draw_tokens(logits[None], [draw], num_token_ids)[0].token_id


def transformers_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """What transformers' processors and warpers, in its order, leave of the logits."""
    scores, seen = logits[None].clone(), torch.tensor([PROMPT])
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores)
    scores = TemperatureLogitsWarper(float(sampling.temperature))(seen, scores)
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(seen, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(seen, scores)
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(seen, scores)
    return scores.double().softmax(-1)[0]


PROMPT = [3, 5, 5, 11, 30]


@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_thousand_draws_follow_transformers_distribution(name: str) -> None:
    sampling = params(**SETTINGS[name])
    draws = [
        Draw(0, params(seed=seed, **SETTINGS[name]), 0, PROMPT, len(PROMPT))
        for seed in range(NUM_DRAWS)
    ]
    counts = Counter(drawn.token_id for drawn in draw_tokens(LOGITS[None], draws, VOCAB))
    expected = transformers_probabilities(LOGITS, sampling) * NUM_DRAWS
    assert all(expected[token_id] > 0 for token_id in counts)
    assert chi_square_p(counts, expected.tolist()) > SMALLEST_P


def chi_square_p(counts: Counter[int], expected: list[float]) -> float:
    """Tokens expected less than five times are counted together."""
    common = [i for i, number in enumerate(expected) if number >= 5]
    observed = [float(counts[i]) for i in common]
    wanted = [expected[i] for i in common]
    if (rest := NUM_DRAWS - sum(wanted)) > 1e-6 * NUM_DRAWS:
        observed.append(NUM_DRAWS - sum(observed))
        wanted.append(rest)
    return float(chisquare(observed, wanted).pvalue) if len(wanted) > 1 else 1.0


def test_successive_tokens_of_one_seed_are_independent_uniforms() -> None:
    numbers = [uniform(seed=9, choice=0, index=i) for i in range(NUM_DRAWS)]
    assert all(0 <= number < 1 for number in numbers)
    cells = Counter(
        (int(8 * a), int(8 * b)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)
    )
    observed = [cells[i, j] for i in range(8) for j in range(8)]
    assert chisquare(observed).pvalue > SMALLEST_P


def test_a_draw_does_not_depend_on_the_rest_of_the_batch_F16() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) * 3
    kinds = [
        params(seed=1),
        params(seed=2, top_p=0.9),
        params(seed=3, temperature=0.0),
        params(seed=4, top_k=50, frequency_penalty=0.5),
        params(seed=5, min_p=0.02, logprobs=2),
        params(seed=6, temperature=0.0, repetition_penalty=1.3),
    ]
    draws = [Draw(i, kind, i, [7, 8, 9, 9], 2) for i, kind in enumerate(kinds)]
    together = draw_tokens(logits, draws, 1000)
    backwards = draw_tokens(logits, draws[::-1], 1000)[::-1]
    alone = [draw_tokens(logits, [draw], 1000)[0] for draw in draws]
    assert together == backwards == alone


def test_choices_and_positions_draw_differently_and_repeatably_F19() -> None:
    def text(choice: int, seed: int = 5) -> list[int]:
        return [
            draw_one(LOGITS, params(seed=seed), choice=choice, output=[0] * i) for i in range(30)
        ]

    texts = [text(0), text(1), text(2), text(0, seed=6)]
    assert len({tuple(tokens) for tokens in texts}) == 4
    assert text(1) == texts[1]
    assert len(set(texts[0])) > 5


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0])
    assert draw_one(logits, params(temperature=0.0), num_token_ids=5) == 1
    halves = torch.stack((logits, logits.flip(0))).bfloat16()
    draws = [Draw(i, params(temperature=0.0), 0, [1], 1) for i in (1, 0)]
    assert [drawn.token_id for drawn in draw_tokens(halves, draws, 5)] == [1, 1]


def test_tokens_that_tie_at_an_edge_all_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0])
    for sampling in ({"top_k": 2}, {"top_p": 0.75}):
        drawn = {
            draw_one(logits, params(seed=seed, **sampling), num_token_ids=5) for seed in range(400)
        }
        assert drawn == {0, 1, 2, 3}


def test_a_nucleus_wider_than_the_first_look_is_cut_at_the_same_token() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.1
    kept = transformers_probabilities(logits, params(top_p=0.7)) > 0
    sampling = [params(seed=seed, top_p=0.7) for seed in range(300)]
    drawn = {draw_one(logits, each, num_token_ids=5000) for each in sampling}
    assert all(kept[token_id] for token_id in drawn)
    lowest_kept = logits[kept].min()
    assert min(logits[list(drawn)]) < lowest_kept + 0.02


def test_padding_of_the_vocabulary_is_never_drawn_E8() -> None:
    logits = torch.zeros(10)
    logits[8:] = 50.0
    assert draw_one(logits, params(temperature=0.0), num_token_ids=8) == 0
    drawn = {draw_one(logits, params(seed=seed), num_token_ids=8) for seed in range(100)}
    assert drawn == set(range(8))


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    sampling = params(temperature=0.0, min_tokens=2, end_token_ids=(4, 2))
    logits = torch.tensor([0.0, 1.0, 3.0, 0.5, 5.0])
    assert draw_one(logits, sampling, output=[], num_token_ids=5) == 1
    assert draw_one(logits, sampling, output=[1], num_token_ids=5) == 1
    assert draw_one(logits, sampling, output=[1, 1], num_token_ids=5) == 4


def test_presence_counts_once_and_frequency_each_time_in_the_output_only() -> None:
    logits = torch.tensor([3.0, 2.0, 1.5, 0.0])

    def best(presence: float, frequency: float, prompt: list[int], output: list[int]) -> int:
        sampling = params(temperature=0.0, presence_penalty=presence, frequency_penalty=frequency)
        return draw_one(logits, sampling, prompt=prompt, output=output, num_token_ids=4)

    assert best(2.0, 0.0, [0, 0], []) == 0
    assert best(0.9, 0.0, [2], [0, 0, 0]) == 0
    assert best(1.1, 0.0, [2], [0, 0, 0]) == 1
    assert best(0.0, 0.4, [2], [0, 0]) == 0
    assert best(0.0, 0.4, [2], [0, 0, 0]) == 1
    assert best(0.5, 0.3, [2], [0, 0, 1]) == 0
    assert best(-2.0, 0.0, [0], [1]) == 1


def test_repetition_is_penalised_by_sign_over_prompt_and_output() -> None:
    logits = torch.tensor([-1.0, -1.5, -1.9])
    sampling = params(temperature=0.0, repetition_penalty=2.0)
    assert draw_one(logits, sampling, prompt=[2], num_token_ids=3) == 0
    assert draw_one(logits, sampling, prompt=[0], num_token_ids=3) == 1
    assert draw_one(logits, sampling, prompt=[0], output=[1], num_token_ids=3) == 2
    assert draw_one(logits + 4, sampling, prompt=[0], output=[1], num_token_ids=3) == 2


def test_logit_bias_adds_and_ignores_ids_outside_the_vocabulary() -> None:
    sampling = params(temperature=0.0, logit_bias=((3, 9.0), (0, -100.0), (77, 5.0)))
    assert draw_one(torch.tensor([5.0, 4.0, 0.0, 0.0]), sampling, num_token_ids=4) == 3


def test_logprobs_are_those_of_the_raw_logits_sorted_with_lowest_ids_first() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0])
    sampling = params(temperature=0.0, logit_bias=((0, 50.0),), logprobs=3)
    drawn = draw_tokens(logits[None], [Draw(0, sampling, 0, [1], 1)], 4)[0]
    raw = logits.log_softmax(-1).tolist()
    assert drawn.token_id == 0
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(raw[0], abs=1e-6)
    assert [token_id for token_id, _ in drawn.logprobs.top] == [1, 2, 0]
    assert [value for _, value in drawn.logprobs.top] == pytest.approx([raw[1], raw[2], raw[0]])


def test_no_alternatives_are_listed_when_none_are_asked_for() -> None:
    scored = prompt_logprobs(LOGITS[None], [5], 0, VOCAB)[0]
    assert scored.top == ()
    assert math.exp(scored.logprob) == pytest.approx(float(LOGITS.softmax(-1)[5]), rel=1e-5)


def test_nearly_zero_temperature_and_hopeless_logits_still_draw_a_token() -> None:
    assert draw_one(LOGITS, params(temperature=1e-6)) == int(LOGITS.argmax())
    assert draw_one(LOGITS, params(top_p=0.0)) == int(LOGITS.argmax())
    assert 0 <= draw_one(torch.full((VOCAB,), math.nan), params(top_p=0.5)) < VOCAB
    assert 0 <= draw_one(torch.full((VOCAB,), math.inf), params(top_k=3)) < VOCAB


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rules", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}])
def test_a_model_that_overflows_still_gives_a_token_and_finite_numbers(
    bad: float, rules: dict[str, Any]
) -> None:
    """Numbers that JSON cannot hold once broke the worker's link, and so killed the worker."""
    for logits in (
        torch.full((1, 50), bad),
        torch.cat([torch.zeros(1, 49), torch.tensor([[bad]])], 1),
    ):
        sampling = SamplingParams(max_tokens=5, seed=1, logprobs=2, **rules)
        (drawn,) = draw_tokens(logits, [Draw(0, sampling, 0, [1, 2], 1)], 50)
        assert 0 <= drawn.token_id < 50
        assert drawn.logprobs is not None
        numbers = [drawn.logprobs.logprob, *(value for _, value in drawn.logprobs.top)]
        assert all(math.isfinite(number) for number in numbers)
