"""Every sampling and output feature by the real engine: the same answers in every topology, under
preemption, and when workers die in the middle or worse happens."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from ipc.vocabulary import Role
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.parity_features import (
    FEATURES,
    Answer,
    assert_features_matter,
    assert_same,
)
from tests.end_to_end.parity_town import ALONE, SCENARIOS, Scenario, ask_all

TOLERANCE = 1e-4  # of log probabilities: batches of other shapes round differently


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

    def make(scenario: Scenario, role: Role, name: str, epoch: int) -> EngineRig:
        limits = {"num_blocks": scenario.num_blocks, "max_batch": 64}
        if role is Role.MIXED and scenario.chunk_tokens:
            limits["chunk_tokens"] = scenario.chunk_tokens
        return EngineRig(role, model, name=name, epoch=epoch, **limits)

    return ask_all(model, name, make)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != ALONE])
def test_a_feature_gives_the_same_result_everywhere_and_whatever_happens_B15_B16_F18_F22_F24(
    tiny_llama: Path, scenario: str, feature: str
) -> None:
    given, expected = (answers(tiny_llama, name)[feature] for name in (scenario, ALONE))
    for answer, alone in zip(given, expected, strict=True):
        assert_same(answer, alone, TOLERANCE)


def test_the_features_do_something(tiny_llama: Path) -> None:
    assert_features_matter(answers(tiny_llama, ALONE))
