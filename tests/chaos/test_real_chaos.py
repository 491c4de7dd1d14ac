"""Real processes that are killed, stopped, starved and lied to under a mixed load with aborts:
every client has its one ending and its own answer, and nothing is left behind."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.arena import Arena, spread, under_attack
from tests.chaos.asks import Ending, known_asks
from tests.chaos.attacks import DAEMON, Attack
from tests.end_to_end.reference import Reference
from tests.end_to_end.service import eventually
from tests.gpu_workers.checkpoints import llama_gqa

TOPOLOGIES = {
    "1P+2D": ("--prefill", "1", "--decode", "2"),
    "2M": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
}
NUM_ASKS, ROUND_SIZE = 30, 100
STRIKE_WITHIN_S = 0.7
ROUNDS = {
    "1P+2D": (
        ((Attack.SIGKILL, "prefill-0"), (Attack.CORRUPT_UP, "decode-0")),
        ((Attack.HUNG_STEP, "decode-1"), (Attack.DROPPED_DOWN, "prefill-0")),
        ((Attack.NO_MEMORY, "decode-0"), (Attack.NO_DESCRIPTORS, "decode-1")),
        ((Attack.PAUSED, DAEMON), (Attack.DUPLICATED_UP, "prefill-0")),
    ),
    "2M": (
        ((Attack.SIGTERM, "mixed-0"), (Attack.PAUSED, "mixed-1")),
        ((Attack.FROZEN, "mixed-1"), (Attack.DUPLICATED_UP, "mixed-0")),
        (
            (Attack.CORRUPT_DOWN, "mixed-0"),
            (Attack.DROPPED_UP, "mixed-1"),
            (Attack.SLOW, "mixed-1"),
        ),
        ((Attack.NO_DESCRIPTORS, DAEMON),),
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(llama_gqa(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="module", params=["1P+2D", pytest.param("2M", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    "number",
    [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))],
)
def test_nobody_notices_what_happens_to_the_workers_B1_B2_B3_B19_C2_C5(
    arena: tuple[str, Arena], number: int
) -> None:
    topology, house = arena
    strikes = spread(ROUNDS[topology][number], STRIKE_WITHIN_S, seed=number)
    house.round(strikes, seed=number, size=ROUND_SIZE)


@pytest.mark.parametrize(
    ("attack", "allowed"),
    [
        (Attack.SIGKILL, {Ending.LEFT, Ending.REFUSED, Ending.CUT}),
        pytest.param(Attack.SIGTERM, {Ending.LEFT, Ending.REFUSED}, marks=pytest.mark.slow),
    ],
)
def test_a_daemon_that_ends_takes_all_along_and_its_successor_finds_nothing_left_C1_C7_C9(
    reference: Reference, tmp_path: Path, attack: Attack, allowed: set[Ending]
) -> None:
    model = reference.directory
    with under_attack(model, tmp_path) as service:
        arena = Arena(service, tmp_path, known_asks(service, reference, NUM_ASKS // 2, seed=1))
        workers = list(service.workers().values())
        strikes = spread([(attack, DAEMON)], STRIKE_WITHIN_S, seed=1)
        outcomes = arena.load(strikes, seed=1, size=4 * ROUND_SIZE, allowed=allowed)
        endings = {outcome.ending for outcome in outcomes}
        assert Ending.REFUSED in endings, "some came after the strike"
        assert endings & {Ending.ANSWERED, Ending.CUT}, "some came before it"
        assert service.process.wait(40) == (0 if attack is Attack.SIGTERM else -signal.SIGKILL)
        eventually(lambda: not any(worker.is_running() for worker in workers), 10, "no orphans")
        with under_attack(model, tmp_path, "--run-dir", str(service.run_dir)) as successor:
            again = Arena(successor, tmp_path, arena.known)
            again.round(seed=2)
