"""Drawing on the device: the same tokens as the host's sampler, and no number read in between."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_workers.cuda_sampler import PART_ROWS, DeviceSampler, with_scores
from gpu_workers.sampler import Draw, Drawn, draw_tokens, prompt_logprobs
from ipc.vocabulary import SamplingParams
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.no_reading import NoReading

VOCAB, PADDED = 1500, 1536
LOGITS = torch.randn(6, PADDED, generator=torch.Generator().manual_seed(3)) * 3
PROMPT, OUTPUT = [5, 9, 9, 1400], [7, 7, 11]

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_k of one": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 5000},
    "top_p": {"top_p": 0.7},
    "narrow top_p": {"top_p": 0.01},
    "top_k and top_p": {"top_k": 40, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "greedy repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((3, 9.0), (4, -50.0), (9000, 5.0))},
    "banned": {"end_token_ids": (12, 9000), "min_tokens": 20},
    "all": {
        "temperature": 0.8,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "logit_bias": ((8, 2.0),),
    },
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "seed": 1, **changes})


def draw(row: int, **changes: Any) -> Draw:
    return Draw(row, params(**changes), 0, [*PROMPT, *OUTPUT], len(PROMPT))


def on_device(logits: torch.Tensor, draws: list[Draw]) -> list[Drawn]:
    sampler = DeviceSampler(FakeDevice(), VOCAB)
    drawn = sampler.draw(logits, draws)
    scores = sampler.score_drawn(logits, drawn, draws)
    return with_scores(sampler.fetch_tokens(drawn), scores)()


def ids(drawn: list[Drawn]) -> list[int]:
    return [token.token_id for token in drawn]


@pytest.mark.parametrize("name", SETTINGS)
def test_each_rule_draws_what_the_hosts_sampler_draws(name: str) -> None:
    draws = [
        draw(row, **{**SETTINGS[name], "seed": seed}) for row, seed in product(range(6), range(12))
    ]
    expected = ids(draw_tokens(LOGITS, draws, VOCAB))
    assert ids(on_device(LOGITS, draws)) == expected
    assert all(token < VOCAB for token in expected)


def test_draws_of_all_kinds_share_a_step_and_its_rows() -> None:
    kinds = [*SETTINGS.values(), *SETTINGS.values()]
    draws = [draw(index % 6, **kind) for index, kind in enumerate(kinds)]
    assert ids(on_device(LOGITS, draws)) == ids(draw_tokens(LOGITS, draws, VOCAB))
    assert ids(on_device(LOGITS, draws[::-1])) == ids(draw_tokens(LOGITS, draws[::-1], VOCAB))


class Widest(TorchDispatchMode):
    """Remembers the most rows of fp32 or fp64 that existed over the vocabulary."""

    rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (VOCAB,):
                self.rows = max(self.rows, len(tensor))
        return made


def test_many_draws_are_made_in_parts_that_memory_is_kept_for() -> None:
    kinds = [kind for name, kind in SETTINGS.items() if name != "greedy"]
    draws = [draw(i % 6, **{**kinds[i % len(kinds)], "seed": i, "logprobs": 1}) for i in range(150)]
    with Widest() as widest:
        drawn = on_device(LOGITS, draws)
    assert widest.rows == PART_ROWS
    expected = draw_tokens(LOGITS, draws, VOCAB)
    assert ids(drawn) == ids(expected)
    assert [token.logprobs is None for token in drawn] == [False] * len(draws)


def test_sixteen_bit_logits_are_drawn_from_alike() -> None:
    draws = [draw(row, **kind) for row, kind in enumerate(list(SETTINGS.values())[:6])]
    logits = LOGITS.bfloat16()
    assert ids(on_device(logits, draws)) == ids(draw_tokens(logits, draws, VOCAB))


def test_tokens_under_way_count_in_a_draws_place_in_the_stream() -> None:
    known = Draw(0, params(), 0, [*PROMPT, 1, 2], len(PROMPT))
    under_way = Draw(0, params(), 0, [*PROMPT, 1], len(PROMPT), num_unseen=1)
    behind = Draw(0, params(), 0, [*PROMPT, 1], len(PROMPT))
    found = ids(on_device(LOGITS, [known, under_way, behind]))
    assert found[0] == found[1] != found[2]


def test_log_probabilities_are_those_of_the_raw_logits_and_only_where_asked_for() -> None:
    draws = [draw(0, logprobs=3), draw(1), draw(2, logprobs=0), draw(3, logprobs=3, top_k=2)]
    ours, theirs = on_device(LOGITS, draws), draw_tokens(LOGITS, draws, VOCAB)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.logprobs is None) == (other.logprobs is None)
        if mine.logprobs is not None and other.logprobs is not None:
            assert mine.logprobs.token_id == other.logprobs.token_id
            assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
            assert [i for i, _ in mine.logprobs.top] == [i for i, _ in other.logprobs.top]


def test_prompts_are_scored_as_on_the_host_and_every_number_is_finite() -> None:
    logits = LOGITS.clone()
    logits[1, 5] = -torch.inf
    targets = [3, 5, 7, 9, 11, 13]
    sampler = DeviceSampler(FakeDevice(), VOCAB)
    ours = sampler.score(logits, torch.tensor(targets), 2)()
    theirs = prompt_logprobs(logits, targets, 2, VOCAB)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_id, [i for i, _ in mine.top]) == (
            other.token_id,
            [i for i, _ in other.top],
        )
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_overflowed_still_draws_tokens_that_exist(name: str) -> None:
    for number in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full_like(LOGITS, number)
        draws = [draw(row, **SETTINGS[name], logprobs=1) for row in range(6)]
        assert all(0 <= token < VOCAB for token in ids(on_device(logits, draws)))


def reading(look: Callable[[], object]) -> None:
    with NoReading():
        look()


def test_nothing_is_read_from_the_device_until_the_step_is_collected() -> None:
    draws = [draw(index % 6, **kind, logprobs=2) for index, kind in enumerate(SETTINGS.values())]
    reading(lambda: on_device(LOGITS, draws))
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        reading(lambda: draw_tokens(LOGITS, draws, VOCAB))
