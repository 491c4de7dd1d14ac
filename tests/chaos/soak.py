"""`make soak`: processes under random attacks for SOAK_S seconds, and a table of what came of it.

Each round of attack is preceded by the same load undisturbed. The p99 is that of requests whom the
attack hardly concerned: as many of the slowest are left out, of either round, as there are clients
(no more can be under way at the victim at a time) or as choices were computed again. It is told
only where a spare of the victim's role was there.
"""

import argparse
import contextlib
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.chaos.arena import NUM_CLIENTS, Arena, Known, Round, spread, under_attack
from tests.chaos.asks import Ending, Outcome, known_asks
from tests.chaos.attacks import DAEMON, Attack
from tests.end_to_end.reference import Reference
from tests.end_to_end.service import Service, eventually
from tests.gpu_workers.checkpoints import llama_gqa

logger = logging.getLogger(__name__)

TOPOLOGIES = {
    "1P+1D": ("--prefill", "1", "--decode", "1"),
    "2P+2D": ("--prefill", "2", "--decode", "2"),
    "2M": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
}
SPARE = ("2P+2D", "2M")
ON_DAEMON = (Attack.PAUSED, Attack.SLOW, Attack.NO_DESCRIPTORS, Attack.SIGKILL, Attack.SIGTERM)
ENDS_DAEMON = {Attack.SIGKILL: -signal.SIGKILL, Attack.SIGTERM: 0}
NUM_ASKS, ROUND_SIZE = 60, 160
LIFE_S = 150.0  # then another: back-off grows with every death
ALLOWED = {Ending.LEFT, Ending.REFUSED, Ending.CUT}


class Cell(msgspec.Struct):
    """All rounds of one attack on one kind of victim."""

    count: int = 0
    endings: Counter[Ending] = msgspec.field(default_factory=Counter)
    num_retries: float = 0
    recovered_s: list[float] = []
    free_s: list[float] = []
    undisturbed_s: list[float] = []
    unaffected_s: list[float] = []

    def add(self, undisturbed: Round, attacked: Round, *, has_spare: bool) -> None:
        self.take(attacked.outcomes)
        self.num_retries += attacked.num_retries
        self.recovered_s.append(attacked.recovered_s)
        self.free_s.append(attacked.free_s)
        if has_spare:
            num_affected = max(NUM_CLIENTS, int(attacked.num_retries))
            self.unaffected_s += answered_s(attacked)[:-num_affected]
            self.undisturbed_s += answered_s(undisturbed)[:-num_affected]

    def take(self, outcomes: Sequence[Outcome]) -> None:
        self.count += 1
        self.endings.update(outcome.ending for outcome in outcomes)

    @property
    def row(self) -> Iterator[str]:
        yield str(self.count)
        yield ", ".join(f"{count} {ending}" for ending, count in sorted(self.endings.items()))
        yield f"{self.num_retries:.0f}"
        yield spread_of(self.recovered_s)
        yield spread_of(self.free_s)
        if not (self.undisturbed_s and self.unaffected_s):
            yield "-"
            return
        yield f"{p99(self.unaffected_s) / p99(self.undisturbed_s):.2f}"


def answered_s(of: Round) -> list[float]:
    return sorted(o.seconds for o in of.outcomes if o.ending is Ending.ANSWERED)


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[max(0, round(0.99 * len(seconds)) - 1)]


def spread_of(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} / {max(seconds):.1f}" if seconds else "-"


class Soak:
    """Lives of services, one after the other."""

    def __init__(self, reference: Reference, seed: int, until_s: float) -> None:
        self._reference = reference
        self._dice = random.Random(seed)
        self._until_s = until_s
        self.cells: dict[tuple[Attack, str], Cell] = {}

    def run(self) -> None:
        """Raises AssertionError: something was lost, wrong or left."""
        while time.monotonic() < self._until_s:
            topology = self._dice.choice(list(TOPOLOGIES))
            with tempfile.TemporaryDirectory(prefix="chaos-") as orders:
                self._live(topology, Path(orders))

    def _live(self, topology: str, orders: Path) -> None:
        flags = TOPOLOGIES[topology]
        with under_attack(self._reference.directory, orders, *flags) as service:
            seed = self._dice.randrange(1 << 30)
            arena = Arena(
                service, orders, known_asks(service, self._reference, NUM_ASKS, seed=seed)
            )
            arena.round(seed=seed)
            until_s = min(self._until_s, time.monotonic() + LIFE_S)
            while time.monotonic() < until_s:
                attack, victim = self._choose(arena)
                logger.info("%s: %s on %s", topology, attack, victim)
                if victim == DAEMON and attack in ENDS_DAEMON:
                    self._end(arena, attack)
                    self._succeed(service, orders, flags, arena.known)
                    return
                self._attack(arena, attack, victim, has_spare=topology in SPARE)

    def _choose(self, arena: Arena) -> tuple[Attack, str]:
        victim = self._dice.choice([*arena.instances, DAEMON])
        return self._dice.choice(ON_DAEMON if victim == DAEMON else list(Attack)), victim

    def _attack(self, arena: Arena, attack: Attack, victim: str, *, has_spare: bool) -> None:
        seed = self._dice.randrange(1 << 30)
        undisturbed = arena.round(seed=seed, size=ROUND_SIZE)
        strikes = spread([(attack, victim)], undisturbed.load_s * 0.8, seed)
        attacked = arena.round(strikes, seed=seed, size=ROUND_SIZE)
        self._cell(attack, victim).add(undisturbed, attacked, has_spare=has_spare)

    def _end(self, arena: Arena, attack: Attack) -> None:
        service, seed = arena.service, self._dice.randrange(1 << 30)
        workers = list(service.workers().values())
        strikes = spread([(attack, DAEMON)], 3.0, seed)
        outcomes = arena.load(strikes, seed=seed, size=2 * ROUND_SIZE, allowed=ALLOWED)
        self._cell(attack, DAEMON).take(outcomes)
        assert service.process.wait(60) == ENDS_DAEMON[attack]
        eventually(lambda: not any(worker.is_running() for worker in workers), 10, "no orphans")

    def _succeed(self, service: Service, orders: Path, flags: Sequence[str], known: Known) -> None:
        """The dead daemon's successor finds nothing left."""
        where = ("--run-dir", str(service.run_dir))
        with under_attack(self._reference.directory, orders, *flags, *where) as successor:
            Arena(successor, orders, known).round()

    def _cell(self, attack: Attack, victim: str) -> Cell:
        return self.cells.setdefault((attack, victim.split("-")[0]), Cell())


def table_of(soak: Soak) -> Table:
    table = Table(title="What was done to whom, and what came of it")
    for heading in ("attack", "victim", "times", "endings", "again"):
        table.add_column(heading)
    table.add_column("recovered s\nmedian / worst")
    table.add_column("blocks free s\nmedian / worst")
    table.add_column("p99 of others\nx undisturbed")
    for (attack, victim), cell in sorted(soak.cells.items()):
        table.add_row(attack.value, victim, *cell.row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S", 3600)))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logger.setLevel(logging.INFO)
    logger.info("seed %d, %.0f s", arguments.seed, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, contextlib.ExitStack() as stack:
        reference = Reference(llama_gqa(Path(directory) / "tiny-llama"))
        soak = Soak(reference, arguments.seed, time.monotonic() + arguments.seconds)
        stack.callback(lambda: Console(width=160).print(table_of(soak)))  # of a failed one too
        soak.run()


if __name__ == "__main__":
    main()
