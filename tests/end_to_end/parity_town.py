"""All features asked of a town, in every topology, under preemption, and while workers die."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from daemon.text import Tokenizer
from ipc.vocabulary import Role
from tests.chaos.chaos_town import ChaosTown
from tests.chaos.faults import Fault
from tests.chaos.invariants import check_books
from tests.end_to_end.parity_features import FEATURES, PROMPTS, Answer, answers_of, request
from tests.end_to_end.town import Client
from tests.gpu_workers.rig import Rig

MIXED = {"m0": Role.MIXED}
ONE_AND_ONE = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO_AND_TWO = ONE_AND_ONE | {"p1": Role.PREFILL, "d1": Role.DECODE}


class Scenario(NamedTuple):
    """Instances, their pool, and what happens to them from which tick on."""

    roles: dict[str, Role]
    num_blocks: int = 1536
    chunk_tokens: int | None = None
    strikes: tuple[tuple[Fault, str, int], ...] = ()
    is_one_by_one: bool = False


MakeRig = Callable[[Scenario, Role, str, int], Rig]
"""By role, name and epoch."""

ALONE = "alone"
SCENARIOS = {
    ALONE: Scenario(MIXED, is_one_by_one=True),
    "mixed": Scenario(MIXED),
    "mixed in chunks": Scenario(MIXED, chunk_tokens=24),
    "1P+1D": Scenario(ONE_AND_ONE),
    "2P+2D": Scenario(TWO_AND_TWO),
    "preempted": Scenario(ONE_AND_ONE, num_blocks=48),
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


def ask_all(model: Path, name: str, make_rig: MakeRig, *, pace: int = 1) -> dict[str, list[Answer]]:
    """Answers by feature; what had to happen on the way has happened, and nothing is left.

    `pace` is how many times as many ticks pass before a strike.
    """
    scenario = SCENARIOS[name]
    town = town_of(model, scenario, make_rig)
    for fault, victim, at in scenario.strikes:
        town.strike(fault, victim, at * pace)
    asked: dict[str, list[Client]] = {}
    for feature in FEATURES:
        for prompt in PROMPTS:
            client = town.ask(request(feature, prompt))
            asked.setdefault(feature, []).append(client)
            while scenario.is_one_by_one and not client.is_over:
                town.tick()
    town.settle()
    assert town.num_deaths == len(scenario.strikes)
    num_preempted = sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values())
    assert bool(num_preempted) == (name == "preempted")
    assert num_tried_again(town) >= 4 * len(scenario.strikes)
    check_books(town)
    town.close()
    return {name: [a for c in clients for a in answers_of(c)] for name, clients in asked.items()}


def num_tried_again(town: ChaosTown) -> int:
    """Requests of which work was lost with a worker."""
    requests = [request for client in town.clients for request in client.call.requests]
    return sum(any(trip.num_retries for trip in request.trips) for request in requests)


def town_of(model: Path, scenario: Scenario, make_rig: MakeRig) -> ChaosTown:
    def make(role: Role, name: str, epoch: int) -> Rig:
        return make_rig(scenario, role, name, epoch)

    tokenizer = Tokenizer.from_directory(model)
    return ChaosTown(tokenizer, scenario.roles, seed=3, make_rig=make, max_context=512)
