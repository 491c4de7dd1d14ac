"""Every sampling and output feature by the real engine: the same answers in every topology, under
preemption, and when workers die in the middle or worse happens."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from daemon.generation import Delta, GenerationSpec
from daemon.text import Tokenizer
from ipc.vocabulary import Role, SamplingParams, TokenLogprobs
from tests.chaos.chaos_town import ChaosTown
from tests.chaos.faults import Fault
from tests.chaos.invariants import check_books
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.town import Client
from tests.gpu_workers.checkpoints import EOS

MIXED = {"m0": Role.MIXED}
ONE_AND_ONE = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO_AND_TWO = ONE_AND_ONE | {"p1": Role.PREFILL, "d1": Role.DECODE}
PROMPTS = (list(b"The same prompt, whole or in a batch."), list(b"0123456789" * 5))
TOLERANCE = 1e-4  # of log probabilities: batches of other shapes round differently


def spec(**how: object) -> dict[str, object]:
    """Of a request; what is none of GenerationSpec's own fields is about sampling."""
    own = {key: how.pop(key) for key in GenerationSpec.__struct_fields__ if key in how}
    return own | {"sampling": SamplingParams(**{"max_tokens": 12, "seed": 5} | how)}  # type: ignore[arg-type]


FEATURES = {
    "greedy": spec(temperature=0.0),
    "seeded": spec(),
    "temperature": spec(temperature=1.7),
    "top_p": spec(top_p=0.6),
    "top_k": spec(top_k=5),
    "min_p": spec(min_p=0.1),
    "presence_penalty": spec(temperature=0.0, presence_penalty=1.5),
    "frequency_penalty": spec(temperature=0.0, frequency_penalty=1.2),
    "repetition_penalty": spec(temperature=0.0, repetition_penalty=1.4),
    "logit_bias": spec(logit_bias=((65, 6.0), (66, 6.0), (32, -100.0))),
    "end tokens": spec(end_token_ids=(EOS, *range(0, 256, 5))),
    "min_tokens": spec(min_tokens=6, end_token_ids=(EOS, *range(0, 256, 5))),
    "stop strings": spec(logit_bias=((101, 9.0), (102, 9.0)), stop=("eff", "fee")),
    "logprobs": spec(logprobs=4),
    "logprobs of the drawn alone": spec(temperature=0.0, logprobs=0),
    "choices": spec(num_choices=3),
    "choices with logprobs": spec(num_choices=3, logprobs=2, presence_penalty=0.7),
    "one token": spec(max_tokens=1, num_choices=2),
    "echo with logprobs": spec(prompt_logprobs=2, logprobs=2),
    "the prompt alone": spec(max_tokens=0, prompt_logprobs=1),
}


class Scenario(NamedTuple):
    """Instances, their pool, and what happens to them from which tick on."""

    roles: dict[str, Role]
    num_blocks: int = 1536
    chunk_tokens: int | None = None
    strikes: tuple[tuple[Fault, str, int], ...] = ()


ALONE = "alone"  # one after the other
SCENARIOS = {
    ALONE: Scenario(MIXED),
    "mixed in chunks": Scenario(MIXED, chunk_tokens=24),
    "1P+1D": Scenario(ONE_AND_ONE),
    "2P+2D": Scenario(TWO_AND_TWO),
    "preempted": Scenario(ONE_AND_ONE, num_blocks=64),
    "mixed, killed early": Scenario(MIXED, strikes=((Fault.DEATH, "m0", 12),)),
    "mixed, killed late": Scenario(MIXED, strikes=((Fault.DEATH, "m0", 60),)),
    "prefill killed": Scenario(ONE_AND_ONE, strikes=((Fault.DEATH, "p0", 20),)),
    "decode killed": Scenario(ONE_AND_ONE, strikes=((Fault.DEATH, "d0", 50),)),
    "decode killed twice": Scenario(
        ONE_AND_ONE, strikes=((Fault.DEATH, "d0", 50), (Fault.DEATH, "d0", 230))
    ),
    "one of two killed": Scenario(
        TWO_AND_TWO, strikes=((Fault.DEATH, "p1", 30), (Fault.DEATH, "d1", 90))
    ),
    "lied to": Scenario(
        TWO_AND_TWO,
        strikes=((Fault.CORRUPT_UP, "d0", 80), (Fault.DUPLICATED_DOWN, "p0", 30)),
    ),
    "forgotten": Scenario(
        ONE_AND_ONE, strikes=((Fault.DROPPED_UP, "p0", 30), (Fault.FROZEN, "d0", 90))
    ),
}


class Answer(NamedTuple):
    """All that a client has of one choice."""

    text: str
    token_ids: list[int]
    finished: list[str]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


@cache
def answers(model: Path, name: str) -> dict[str, list[Answer]]:
    """By feature."""
    scenario = SCENARIOS[name]
    town = town_of(model, scenario)
    for strike in scenario.strikes:
        town.strike(*strike)
    asked: dict[str, list[Client]] = {}
    for feature, how in FEATURES.items():
        for prompt in PROMPTS:
            client = town.ask(GenerationSpec(prompt=tuple(prompt), **how))  # type: ignore[arg-type]
            asked.setdefault(feature, []).append(client)
            while name == ALONE and not client.is_over:
                town.tick()
    town.settle()
    assert town.num_deaths == len(scenario.strikes)
    num_preempted = sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values())
    assert bool(num_preempted) == (name == "preempted")
    assert num_tried_again(town) >= 4 * len(scenario.strikes)
    check_books(town)
    town.close()
    return {name: [a for c in clients for a in of(c)] for name, clients in asked.items()}


def num_tried_again(town: ChaosTown) -> int:
    """Requests of which work was lost with a worker."""
    requests = [request for client in town.clients for request in client.call.requests]
    return sum(any(trip.num_retries for trip in request.trips) for request in requests)


def town_of(model: Path, scenario: Scenario) -> ChaosTown:
    def make(role: Role, name: str, epoch: int) -> EngineRig:
        limits = {"num_blocks": scenario.num_blocks, "max_batch": 64}
        if role is Role.MIXED and scenario.chunk_tokens:
            limits["chunk_tokens"] = scenario.chunk_tokens
        return EngineRig(role, model, name=name, epoch=epoch, **limits)

    tokenizer = Tokenizer.from_directory(model)
    return ChaosTown(tokenizer, scenario.roles, seed=3, make_rig=make, max_context=512)


def of(client: Client) -> Iterator[Answer]:
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


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != ALONE])
def test_a_feature_gives_the_same_result_everywhere_and_whatever_happens_B15_B16_F18_F22_F24(
    tiny_llama: Path, scenario: str, feature: str
) -> None:
    given, expected = (answers(tiny_llama, name)[feature] for name in (scenario, ALONE))
    for answer, alone in zip(given, expected, strict=True):
        assert answer[:2] == alone[:2]
        assert answer.finished == alone.finished
        assert len(answer.finished) == 1
        assert_alike(answer.logprobs, alone.logprobs)
        assert_alike(answer.prompt_logprobs, alone.prompt_logprobs)


def test_the_features_do_something(tiny_llama: Path) -> None:
    alone = answers(tiny_llama, ALONE)
    texts = {name: tuple(answer.text for answer in given) for name, given in alone.items()}
    same_as_seeded = {"seeded", "logprobs", "echo with logprobs"}
    assert {name for name in texts if texts[name] == texts["seeded"]} == same_as_seeded
    assert "stop" in {a.finished[0] for a in alone["stop strings"]}
    assert "stop" in {a.finished[0] for a in alone["end tokens"]}
    assert len({a.text for a in alone["choices"]}) == 3 * len(PROMPTS)
    assert all(len(a.logprobs) == len(a.token_ids) for a in alone["logprobs"])
    prompts = [len(prompt) for prompt in PROMPTS]
    assert [len(a.prompt_logprobs) for a in alone["echo with logprobs"]] == prompts
    assert [len(a.prompt_logprobs) for a in alone["the prompt alone"]] == prompts


def assert_alike(
    given: list[TokenLogprobs] | list[TokenLogprobs | None],
    expected: list[TokenLogprobs] | list[TokenLogprobs | None],
) -> None:
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
