"""Every fault at random moments of a mixed load, in one thread: nobody notices, nothing is left."""

import random
from functools import cache

import pytest

from daemon.text import Tokenizer
from ipc.vocabulary import Role
from tests.chaos.chaos_town import ChaosTown
from tests.chaos.faults import Fault
from tests.chaos.invariants import check
from tests.chaos.load import Answer, answers_of, visits
from tests.end_to_end.town import tokenizer_of
from tests.gpu_workers.checkpoints import write_tokenizer

ONE_AND_ONE = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO_AND_TWO = ONE_AND_ONE | {"p1": Role.PREFILL, "d1": Role.DECODE}
TOPOLOGIES = {
    "p0": (ONE_AND_ONE, TWO_AND_TWO, ONE_AND_ONE | {"m0": Role.MIXED}),
    "d0": (ONE_AND_ONE, TWO_AND_TWO, {"m0": Role.MIXED, "d0": Role.DECODE}),
    "m0": (
        {"m0": Role.MIXED},
        {"m0": Role.MIXED, "m1": Role.MIXED},
        ONE_AND_ONE | {"m0": Role.MIXED},
    ),
}
NUM_VISITS = 24
SMALL_POOL = 18


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return tokenizer_of(directory, (directory / "tokenizer.json").read_text())


@cache
def undisturbed(tokenizer: Tokenizer, seed: int) -> list[list[Answer]]:
    """What the clients of that load have when nothing goes wrong and nobody leaves."""
    town = ChaosTown(tokenizer, ONE_AND_ONE, seed=0)
    for visit in visits(seed, NUM_VISITS):
        town.ask(*visit.specs)
    town.settle()
    answers = [list(answers_of(client)) for client in town.clients]
    assert all(len(answer.endings) == 1 for call in answers for answer in call)
    return answers


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("victim", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_notices_what_happens_to_one_instance(
    tokenizer: Tokenizer, fault: Fault, victim: str, seed: int
) -> None:
    roles = TOPOLOGIES[victim][seed % 3]
    small = {victim: SMALL_POOL} if fault is Fault.PRESSURE else {}
    town = ChaosTown(tokenizer, roles, seed=seed, num_blocks=small)
    town.strike(fault, victim, at=random.Random(seed).randrange(300))
    town.visit(visits(seed, NUM_VISITS))
    town.settle()
    check(town, undisturbed(tokenizer, seed))
