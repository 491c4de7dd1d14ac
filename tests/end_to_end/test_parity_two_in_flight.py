"""Every feature on played GPUs that are behind, two steps of a sequence under way: what the CPU
says in 32 bit, in every topology, under preemption, and when workers die or worse happens."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.block_pool import BlockPool
from ipc.vocabulary import Role
from tests.chaos.invariants import check_books
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.parity_features import (
    FEATURES,
    PROMPTS,
    Answer,
    answers_of,
    assert_features_matter,
    assert_same,
    is_decided,
    request,
)
from tests.end_to_end.parity_town import (
    ALONE,
    SCENARIOS,
    MakeRig,
    Scenario,
    ask_all,
    town_of,
)
from tests.end_to_end.played_rig import PlayedRig
from tests.end_to_end.reference import Reference
from tests.end_to_end.terse_model import terse_llama
from tests.end_to_end.town import Client

NOISE = 0.01  # of logits; the CPU's own in float16 are off by 0.005 (standard deviation)
TOLERANCE = 0.1  # of log probabilities
RUSHED = ("end tokens", "stop strings", "min_tokens", "logprobs", "logprobs of the drawn alone")
QUICK = {"mixed in chunks", "1P+1D", "preempted", "decode killed"}


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_llama(tmp_path_factory.mktemp("models") / "terse-llama")


@cache
def expected(model: Path) -> dict[str, list[Answer]]:
    """By feature: of the CPU in 32 bit, each request alone."""

    def make(scenario: Scenario, role: Role, name: str, epoch: int) -> EngineRig:
        return EngineRig(role, model, name=name, epoch=epoch, num_blocks=scenario.num_blocks)

    return ask_all(model, ALONE, make)


def maker(model: Path, seed: int) -> MakeRig:
    def make(scenario: Scenario, role: Role, name: str, epoch: int) -> PlayedRig:
        return PlayedRig(
            role,
            model,
            name=name,
            epoch=epoch,
            seed=seed,
            num_blocks=scenario.num_blocks,
            chunk_tokens=scenario.chunk_tokens if role is Role.MIXED else None,
        )

    return make


@cache
def played(model: Path, name: str) -> dict[str, list[Answer]]:
    """By feature: of played GPUs in 16 bit."""
    return ask_all(model, name, maker(model, seed=0), pace=2)  # a step is two acts of a house


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SCENARIOS],
)
def test_a_feature_gives_what_the_cpu_gives_with_two_steps_under_way_B15_F18_F22(
    model: Path, scenario: str, feature: str
) -> None:
    given = played(model, scenario)[feature]
    for answer, alone in zip(given, expected(model)[feature], strict=True):
        assert_same(answer, alone, TOLERANCE)


def test_the_features_do_something(model: Path) -> None:
    assert_features_matter(expected(model))


@pytest.mark.parametrize("feature", FEATURES)
def test_no_draw_is_near_a_tie(model: Path, feature: str) -> None:
    """Else all this would be luck."""
    answers = iter(expected(model)[feature])
    reference = reference_of(model)
    for prompt in PROMPTS:
        asked = request(feature, prompt)
        given = [next(answers) for _ in range(asked.num_choices)]
        assert is_decided(reference, asked, given, NOISE)


@cache
def reference_of(model: Path) -> Reference:
    reference = Reference(model)
    assert reference.model is not None  # loaded here, as that sets the number of threads
    torch.set_num_threads(1)
    return reference


def rush(model: Path, seed: int) -> list[bool]:
    """Requests that end early, and clients that leave, in a pool too small for all; whether each
    who stayed had the answer that the CPU gives."""
    scenario = SCENARIOS["preempted"]
    town = town_of(model, scenario, maker(model, seed))
    dice = random.Random(seed)
    asked: list[tuple[str, int, Client]] = []
    for number in range(40):
        feature, which = dice.choice(RUSHED), number % len(PROMPTS)
        client = town.ask(request(feature, PROMPTS[which]))
        asked.append((feature, which, client))
        for _ in range(dice.randrange(25)):
            town.tick()
        leaving = dice.choice(asked)[2]
        if dice.random() < 0.3 and leaving.deltas and not leaving.is_over:
            leaving.leave()
    town.settle()
    check_books(town)
    town.close()
    stayed = [one for one in asked if not one[2].has_left]
    return [is_same(next(answers_of(c)), expected(model)[name][which]) for name, which, c in stayed]


def is_same(given: Answer, alone: Answer) -> bool:
    try:
        assert_same(given, alone, TOLERANCE)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("seed", range(2))
def test_who_stays_is_answered_rightly_while_others_end_and_leave_A6(
    model: Path, seed: int
) -> None:
    assert all(rush(model, seed))


def test_blocks_that_are_free_before_their_step_has_ended_change_what_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull beside the steps fills them, then the late step writes into them."""

    def retire(pool: Any, block_id: int) -> None:
        pool._free.append(block_id)

    monkeypatch.setattr(BlockPool, "_retire", retire)
    assert not all(all(rush(model, seed)) for seed in range(8))
