"""Log probabilities of a real engine over the hand-over: each token has its own, the first too."""

from pathlib import Path

import pytest
import torch

from daemon.generation import GenerationSpec
from daemon.text import Tokenizer
from ipc.vocabulary import Role, SamplingParams, TokenLogprobs
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.town import Client, Town

PROMPTS = [list(b"one prompt"), list(b"0123456789" * 9), list(b"a")]
SAMPLING = SamplingParams(max_tokens=16, seed=3, logprobs=2, min_tokens=4, end_token_ids=(101,))
TOPOLOGIES = {
    "mixed": ({"m0": Role.MIXED}, 256),
    "1P+1D": ({"p0": Role.PREFILL, "d0": Role.DECODE}, 256),
    "1P+1D preempted": ({"p0": Role.PREFILL, "d0": Role.DECODE}, 38),
}


@pytest.fixture(scope="module")
def answers(tiny_llama: Path) -> dict[str, list[Client]]:
    """Of the same requests in every topology."""
    with torch.inference_mode():
        return {topology: answered(tiny_llama, topology) for topology in TOPOLOGIES}


def answered(model: Path, topology: str) -> list[Client]:
    roles, num_blocks = TOPOLOGIES[topology]
    town = Town(
        Tokenizer.from_directory(model),
        roles,
        make_rig=lambda role, name, epoch: EngineRig(
            role, model, name=name, epoch=epoch, num_blocks=num_blocks
        ),
        max_context=512,
    )
    specs = [
        GenerationSpec(prompt=tuple(p), sampling=SAMPLING, num_choices=2, prompt_logprobs=1)
        for p in PROMPTS
    ]
    clients = [town.ask(spec) for spec in specs]
    town.settle()
    preempted = sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values())
    assert (preempted > 0) == ("preempted" in topology)
    town.check_all_free()
    town.close()
    return clients


def entries(client: Client, choice: int) -> list[TokenLogprobs]:
    mine = [delta for delta in client.deltas if delta.choice == choice]
    return [entry for delta in mine for entry in delta.logprobs or ()]


def test_every_token_keeps_its_log_probability_over_the_handover_B15_B16_F22(
    answers: dict[str, list[Client]],
) -> None:
    for clients in answers.values():
        for client, expected in zip(clients, answers["mixed"], strict=True):
            for choice in (0, 1):
                found, wanted = entries(client, choice), entries(expected, choice)
                assert [entry.token_id for entry in found] == client.tokens(choice)
                assert client.tokens(choice) == expected.tokens(choice)
                assert [e.logprob for e in found] == pytest.approx(
                    [e.logprob for e in wanted], abs=1e-3
                )
                assert {len(entry.top) for entry in found} == {2}


def test_a_prompts_own_entries_come_once_however_often_it_is_prefilled_F8_F24(
    answers: dict[str, list[Client]],
) -> None:
    for clients in answers.values():
        for client in clients:
            told = [d.prompt_logprobs for d in client.deltas if d.prompt_logprobs is not None]
            (own,) = told
            assert client.deltas[0].prompt_logprobs == own
            prompt = client.specs[0].prompt
            assert [None if e is None else e.token_id for e in own] == [None, *prompt[1:]]
