"""One run of the chaos in one thread: a load, its faults, and what must hold after them."""

import random
from functools import cache

from daemon.text import Tokenizer
from ipc.vocabulary import Role
from tests.chaos.chaos_town import ChaosTown
from tests.chaos.faults import Fault
from tests.chaos.invariants import check
from tests.chaos.load import Answer, answers_of, visits

ONE_AND_ONE = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO_AND_TWO = ONE_AND_ONE | {"p1": Role.PREFILL, "d1": Role.DECODE}
ONE_OF_EACH = ONE_AND_ONE | {"m0": Role.MIXED}
TOPOLOGIES = {
    "p0": (ONE_AND_ONE, TWO_AND_TWO, ONE_OF_EACH),
    "d0": (ONE_AND_ONE, TWO_AND_TWO, {"m0": Role.MIXED, "d0": Role.DECODE}),
    "m0": ({"m0": Role.MIXED}, {"m0": Role.MIXED, "m1": Role.MIXED}, ONE_OF_EACH),
}
NUM_VISITS = 24
SMALL_POOL = 18
STRIKE_WITHIN = 200
MAX_DEATHS = 3  # of those that a request may see


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


def one_fault(tokenizer: Tokenizer, fault: Fault, victim: str, seed: int) -> ChaosTown:
    """Raises AssertionError: something was noticed, or is left."""
    roles = TOPOLOGIES[victim][seed % 3]
    small = {victim: SMALL_POOL} if fault is Fault.PRESSURE else {}
    town = ChaosTown(tokenizer, roles, seed=seed, num_blocks=small)
    town.strike(fault, victim, at=random.Random(seed).randrange(STRIKE_WITHIN))
    town.visit(visits(seed, NUM_VISITS))
    run(town, tokenizer, seed)
    assert fault.is_deadly or not town.num_deaths, "slow or full is not wedged"
    return town


def one_late_fault(tokenizer: Tokenizer, fault: Fault, victim: str, seed: int) -> ChaosTown:
    """The same for one of the few messages of a last call, so that no traffic reveals a gap."""
    town = ChaosTown(tokenizer, TOPOLOGIES[victim][seed % 3], seed=seed)
    *others, last = visits(seed, NUM_VISITS)
    town.visit(others)
    town.settle()
    town.strike(fault, victim, at=town.now + seed)
    town.visit([last._replace(gap=0, leaves_after=None)])
    return run(town, tokenizer, seed)


def storm(tokenizer: Tokenizer, seed: int) -> ChaosTown:
    """Everything at once, on everybody, in small pools."""
    dice = random.Random(seed)
    roles = dice.choice((TWO_AND_TWO, ONE_OF_EACH, {"m0": Role.MIXED, "m1": Role.MIXED}))
    town = ChaosTown(tokenizer, roles, seed=seed, num_blocks=dict.fromkeys(roles, 2 * SMALL_POOL))
    deadly = dice.sample([fault for fault in Fault if fault.is_deadly], MAX_DEATHS)
    if Fault.STALE_DOWN in deadly:
        deadly.pop()  # somebody must have died for that, too
    for fault in [*deadly, Fault.SLOW]:
        town.strike(fault, dice.choice(list(roles)), at=dice.randrange(STRIKE_WITHIN))
    town.visit(visits(seed, NUM_VISITS))
    return run(town, tokenizer, seed)


def run(town: ChaosTown, tokenizer: Tokenizer, seed: int) -> ChaosTown:
    town.settle()
    check(town, undisturbed(tokenizer, seed))
    return town
