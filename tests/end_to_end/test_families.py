"""Small checkpoints of every family, by the real engine, through every topology in one process:
transformers' greedy tokens, and the same seeded draws everywhere, also under preemption."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from daemon.generation import GenerationSpec
from ipc.vocabulary import Role, SamplingParams
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.reference import Reference
from tests.end_to_end.town import Client, Town
from tests.gpu_workers.checkpoints import CHECKPOINTS

TOPOLOGIES: dict[str, dict[str, Role]] = {
    "mixed": {"m0": Role.MIXED},
    "1P+1D": {"p0": Role.PREFILL, "d0": Role.DECODE},
    "2P+2D": {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE},
}
PROMPTS = [list(b"The same prompt, whole or in a batch."), list(b"a"), list(b"0123456789" * 9)]
NUM_OUTPUT = 24


@pytest.fixture(scope="module", params=CHECKPOINTS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    path = tmp_path_factory.mktemp("models") / request.param
    return Reference(CHECKPOINTS[request.param](path))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def town_of(reference: Reference, topology: str, **limits: int) -> Town:
    model: Path = reference.directory

    def make(role: Role, name: str, epoch: int) -> EngineRig:
        return EngineRig(role, model, name=name, epoch=epoch, **limits)

    return Town(reference.tokenizer, TOPOLOGIES[topology], make_rig=make, max_context=512)


def ask(town: Town, sampling: SamplingParams, num_choices: int = 1) -> list[Client]:
    return [
        town.ask(GenerationSpec(prompt=tuple(p), sampling=sampling, num_choices=num_choices))
        for p in PROMPTS
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_greedy_tokens_are_those_of_transformers_F18(reference: Reference, topology: str) -> None:
    town = town_of(reference, topology)
    clients = ask(town, SamplingParams(max_tokens=NUM_OUTPUT, seed=0, temperature=0.0))
    town.settle()
    outputs = [client.tokens(0) for client in clients]
    assert [len(output) for output in outputs] == [NUM_OUTPUT] * len(PROMPTS)
    assert reference.shortfalls(PROMPTS, outputs) == [0.0] * len(PROMPTS)
    town.check_all_free()
    town.close()


def test_seeded_draws_are_the_same_everywhere_and_under_preemption_F17_F19_F22_F24(
    reference: Reference,
) -> None:
    sampling = SamplingParams(
        max_tokens=NUM_OUTPUT,
        seed=11,
        temperature=0.8,
        top_p=0.9,
        presence_penalty=0.5,
        repetition_penalty=1.1,
    )
    answers = []
    for topology, num_blocks in (("mixed", 256), ("1P+1D", 256), ("2P+2D", 256), ("1P+1D", 60)):
        town = town_of(reference, topology, num_blocks=num_blocks)
        clients = ask(town, sampling, num_choices=3)
        town.settle()
        answers.append([client.tokens(choice) for client in clients for choice in range(3)])
        if num_blocks == 60:
            assert sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values()) > 0
        town.check_all_free()
        town.close()
    assert len({tuple(tokens) for tokens in answers[0]}) == 3 * len(PROMPTS)
    assert all(answer == answers[0] for answer in answers)
