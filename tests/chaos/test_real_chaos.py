"""Real processes that are killed, stopped, starved and lied to under a mixed load with aborts:
every client has its one ending and its own answer, and nothing is left behind."""

from collections.abc import Iterator

import pytest

from tests.chaos.arena import Arena, spread, under_attack
from tests.chaos.asks import known_asks
from tests.chaos.attacks import Attack
from tests.end_to_end.reference import Reference
from tests.gpu_workers.checkpoints import llama_gqa

TOPOLOGIES = {
    "1P+2D": ("--prefill", "1", "--decode", "2"),
    "2M": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
}
NUM_ASKS = 40
ROUNDS = {
    "1P+2D": (
        ((Attack.SIGKILL, "prefill-0"), (Attack.CORRUPT_UP, "decode-0")),
        ((Attack.HUNG_STEP, "decode-1"), (Attack.DROPPED_DOWN, "prefill-0")),
        ((Attack.NO_MEMORY, "decode-0"), (Attack.NO_DESCRIPTORS, "decode-1")),
    ),
    "2M": (
        ((Attack.SIGTERM, "mixed-0"), (Attack.PAUSED, "mixed-1")),
        ((Attack.FROZEN, "mixed-1"), (Attack.DUPLICATED_UP, "mixed-0")),
        (
            (Attack.CORRUPT_DOWN, "mixed-0"),
            (Attack.DROPPED_UP, "mixed-1"),
            (Attack.SLOW, "mixed-1"),
        ),
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(llama_gqa(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="module", params=TOPOLOGIES)
def arena(
    request: pytest.FixtureRequest,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Arena]]:
    orders = tmp_path_factory.mktemp("orders")
    with under_attack(reference.directory, orders, *TOPOLOGIES[request.param]) as service:
        arena = Arena(service, orders, known_asks(service, reference, NUM_ASKS, seed=0))
        arena.round(seed=0)
        yield request.param, arena


@pytest.mark.parametrize("number", range(3))
def test_nobody_notices_what_happens_to_the_workers_B1_B2_B3_B19_C2_C5(
    arena: tuple[str, Arena], number: int
) -> None:
    topology, house = arena
    undisturbed = house.round(seed=number)
    attacks = ROUNDS[topology][number]
    house.round(spread(attacks, undisturbed.load_s / 2, seed=number), seed=number)
