"""Whatever the order in which prompts are prefilled, and in how many chunks: the same answers.

Whole control planes with scripted engines, over every order of messages that a seed can make; and
the real engine in fp32, whose tokens under skip-join equal those under first come, first served.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from daemon.generation import GenerationSpec
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason, Parallelism, PrefillPolicy, Role, SamplingParams
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.town import Client, Town, spec, tokenizer_of
from tests.gpu_workers.checkpoints import CHECKPOINTS
from tests.gpu_workers.group_rig import GroupRig
from tests.gpu_workers.rig import Rig

SKIP_JOIN = PrefillPolicy.SKIP_JOIN
L_M = 8
ROLES = {
    "1P+1D": {"p0": Role.PREFILL, "d0": Role.DECODE},
    "2P+1M": {"p0": Role.PREFILL, "p1": Role.PREFILL, "m0": Role.MIXED},
    "mixed": {"m0": Role.MIXED},
}
SHAPES = {"p0": Parallelism(1, 2), "p1": Parallelism(2, 1), "m0": Parallelism(2, 2)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


def alone(role: Role, name: str, epoch: int) -> Rig:
    limits = {"max_tokens": L_M, "num_blocks": 40}
    return Rig(role, name=name, epoch=epoch, prefill_policy=SKIP_JOIN, **limits)


def grouped(role: Role, name: str, epoch: int) -> Rig:
    shape = SHAPES.get(name, Parallelism())
    limits = {"max_tokens": L_M, "num_blocks": 40, "seed": epoch}
    return GroupRig(role, shape, name=name, epoch=epoch, prefill_policy=SKIP_JOIN, **limits)


def assert_answered(client: Client) -> None:
    for choice in range(sum(s.num_choices for s in client.specs)):
        assert client.tokens(choice) == client.expected(choice)
        assert [d.finished for d in client.deltas if d.choice == choice and d.finished] == [
            FinishReason.LENGTH
        ]


@pytest.mark.parametrize("make_rig", [alone, grouped])
@pytest.mark.parametrize("topology", ROLES)
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_amid_chunks_leave_nothing_behind_F14(
    tokenizer: Tokenizer, topology: str, make_rig: Callable[[Role, str, int], Rig], seed: int
) -> None:
    town = Town(tokenizer, ROLES[topology], seed=seed, make_rig=make_rig)
    for i in range(40):
        prompt = [town.random.randrange(200) for _ in range(town.random.choice([2, 7, 20, 45]))]
        town.ask(spec(prompt, max_tokens=10, num_choices=1 + i % 2))
        for _ in range(town.random.randrange(12)):
            town.tick()
        if town.random.random() < 0.5:
            town.random.choice(town.clients).leave()
    town.settle()
    for client in town.clients:
        if not client.has_left:
            assert_answered(client)
    town.check_all_free()


@pytest.mark.parametrize("victim", ["p0", "m0"])
@pytest.mark.parametrize("seed", range(4))
def test_a_death_amid_chunks_ends_no_request(tokenizer: Tokenizer, victim: str, seed: int) -> None:
    town = Town(tokenizer, ROLES["2P+1M"], seed=seed, make_rig=alone)
    for i in range(16):
        town.ask(spec(list(range(i, i + 3 + 11 * (i % 4))), max_tokens=8))
    for _ in range(20 + 10 * seed):
        town.tick()
    town.kill(victim)
    town.build(victim)
    town.settle()
    for client in town.clients:
        assert client.error is None
        assert_answered(client)
    town.check_all_free()


PROMPTS = [
    list(b"0123456789" * 20),
    list(b"short"),
    list(b"The same prompt, whole or in chunks, among others."),
    list(b"x" * 37),
    list(b"abcdefgh" * 16),
    list(b"ok"),
]
GREEDY = SamplingParams(max_tokens=6, seed=0, temperature=0.0)
SEEDED = SamplingParams(max_tokens=6, seed=11, temperature=0.9, top_p=0.9, presence_penalty=0.5)


def answers(model: Path, topology: str, policy: PrefillPolicy) -> tuple[list[list[int]], int]:
    """Of all prompts, greedy and seeded, two choices of each; and how many steps that took."""
    tokenizer = Tokenizer.from_directory(model)

    def make(role: Role, name: str, epoch: int) -> EngineRig:
        limits = {"max_tokens": 32, "prefill_policy": policy}
        return EngineRig(role, model, name=name, epoch=epoch, **limits)  # type: ignore[arg-type]

    town = Town(tokenizer, ROLES[topology], make_rig=make, max_context=512)
    clients = [
        town.ask(GenerationSpec(prompt=tuple(prompt), sampling=sampling, num_choices=2))
        for sampling in (GREEDY, SEEDED)
        for prompt in PROMPTS
    ]
    with torch.inference_mode():
        town.settle()
    town.check_all_free()
    num_steps = sum(h.rig.scheduler.counters.prefill_steps for h in town.houses.values())
    town.close()
    return [client.tokens(choice) for client in clients for choice in range(2)], num_steps


@pytest.mark.parametrize(("topology", "name"), [("1P+1D", "llama-gqa"), ("mixed", "opt-pre-norm")])
def test_tokens_equal_those_of_first_come_first_served_in_fp32_F18(
    tmp_path: Path, topology: str, name: str
) -> None:
    model = CHECKPOINTS[name](tmp_path / name)
    expected, num_steps = answers(model, topology, PrefillPolicy.FCFS)
    in_chunks, num_chunked_steps = answers(model, topology, SKIP_JOIN)
    assert in_chunks == expected
    assert num_chunked_steps > num_steps
    assert len({tuple(tokens) for tokens in expected}) > len(PROMPTS)
