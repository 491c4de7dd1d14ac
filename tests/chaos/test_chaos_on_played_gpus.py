"""Real processes on played GPUs, two steps under way, that are killed, hung and lied to under load:
every client has its one ending and its own answer, and nothing is left behind."""

from pathlib import Path

import pytest

from tests.chaos.arena import Arena, spread, under_attack
from tests.chaos.asks import known_asks
from tests.chaos.attacks import Attack
from tests.end_to_end.reference import Reference
from tests.end_to_end.terse_model import terse_llama

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INJECTED = (Path(__file__).parent / "injected_gpus", ROOT)
FLAGS = ("--device", "cuda", "--dtype", "float16", "--block-size", "4", "--max-batch", "16")
NOISE = 0.01  # of logits, in 16 bit
NUM_ASKS, ROUND_SIZE, MAX_TOKENS = 12, 60, 14
STRIKE_WITHIN_S = 0.7
TOPOLOGIES = {
    "1P+2D": ("--prefill", "1", "--decode", "2"),
    "2M": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
}
ROUNDS = {
    "1P+2D": (
        ((Attack.SIGKILL, "decode-0"), (Attack.DUPLICATED_UP, "prefill-0")),
        ((Attack.SIGKILL, "prefill-0"), (Attack.HUNG_STEP, "decode-1")),
        ((Attack.PAUSED, "decode-0"), (Attack.CORRUPT_UP, "decode-1")),
    ),
    "2M": (
        ((Attack.SIGKILL, "mixed-0"), (Attack.PAUSED, "mixed-1")),
        ((Attack.DROPPED_UP, "mixed-1"), (Attack.SIGTERM, "mixed-0")),
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(terse_llama(tmp_path_factory.mktemp("models") / "terse-llama"))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nobody_notices_what_happens_to_workers_on_gpus_B1_B2_B3_B19(
    reference: Reference, tmp_path: Path, topology: str
) -> None:
    flags = (*FLAGS, *TOPOLOGIES[topology])
    with under_attack(reference.directory, tmp_path, *flags, injected=INJECTED) as service:
        known = known_asks(service, reference, NUM_ASKS, seed=0, noise=NOISE, max_tokens=MAX_TOKENS)
        arena = Arena(service, tmp_path, known)
        arena.round(seed=0)
        for number, attacks in enumerate(ROUNDS[topology]):
            strikes = spread(attacks, STRIKE_WITHIN_S, seed=number)
            arena.round(strikes, seed=number, size=ROUND_SIZE)
