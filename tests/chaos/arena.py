"""A service of real processes under attack: its load, its base line, and what must hold after."""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.asks import Answer, Ask, Ending, Outcome
from tests.chaos.attacks import DAEMON, Attack, strike
from tests.end_to_end.service import Service, eventually, serving

WEDGED_AFTER_S = 3.0
FLAGS = (
    *("--dtype", "float32", "--kv-cache-gib", "0.02"),
    *("--wedged-after-s", str(WEDGED_AFTER_S)),
    *("--quarantine-deaths", "0"),  # no device is to blame for what we do
)
INJECTED = Path(__file__).parent / "injected"
NUM_CLIENTS = 8
LEAVE_SHARE = 0.15
BACK_WITHIN_S = 150.0  # new processes, of a machine that others load as well
FREE_WITHIN_S = 10.0  # one second where the machine is ours; others may have it, too
MAX_GROWTH_BYTES = 64 << 20
Known = Sequence[tuple[Ask, Answer]]


class Strike(msgspec.Struct, frozen=True):
    """What happens to whom, so many seconds into a round."""

    attack: Attack
    victim: str
    after_s: float = 0.0


class Round(msgspec.Struct, frozen=True):
    """What came of one round of load."""

    outcomes: list[Outcome]
    load_s: float
    recovered_s: float
    free_s: float
    num_retries: float


class Snapshot(msgspec.Struct, frozen=True):
    """What a service holds of the machine while nothing is asked of it (pools have no names)."""

    descriptors: dict[int, int]
    memory_bytes: int
    run_dir: frozenset[str]


class Arena:
    """Runs rounds of load against a service. `known` are the asks and their answers."""

    def __init__(self, service: Service, orders: Path, known: Known) -> None:
        self.service = service
        self.orders = orders
        self.known = known
        self.instances = sorted(set(re.findall(r"(\S+) is ready: loaded", service.log)))
        self._base: Snapshot | None = None

    @property
    def daemon(self) -> psutil.Process:
        return psutil.Process(self.service.process.pid)

    def round(self, strikes: Sequence[Strike] = (), *, seed: int = 0, size: int = 0) -> Round:
        """Load and strikes together, then back to rest; raises AssertionError if something is
        wrong, lost or left."""
        restarts, retries = self._restarts(), self.metric("distserve_retries_total")
        began_s = time.monotonic()
        outcomes = self.load(strikes, seed=seed, size=size or len(self.known))
        ended_s = time.monotonic()
        self.until_recovered(strikes, restarts)
        recovered_s = time.monotonic()
        self.until_at_rest()
        free_s = time.monotonic() - recovered_s
        self.check_remains()
        return Round(
            outcomes,
            load_s=ended_s - began_s,
            recovered_s=recovered_s - ended_s,
            free_s=free_s,
            num_retries=self.metric("distserve_retries_total") - retries,
        )

    def load(
        self,
        strikes: Sequence[Strike],
        *,
        seed: int,
        size: int,
        allowed: Collection[Ending] = (),
    ) -> list[Outcome]:
        """All outcomes; each answer is checked. `allowed` are endings other than answers.

        It goes on until all that is to happen has happened.
        """
        dice = random.Random(seed)
        asked = [self._some_leave(dice, *dice.choice(self.known)) for _ in range(size)]
        with (
            httpx.Client(base_url=self.service.url, timeout=BACK_WITHIN_S) as client,
            ThreadPoolExecutor(NUM_CLIENTS) as clients,
            striking(strikes, self.service, self.orders) as is_over,
        ):
            outcomes = list(clients.map(lambda one: one[0].by(client), asked))
            while not allowed and not (is_over() and not any(self.orders.iterdir())):
                more = [dice.choice(self.known) for _ in range(NUM_CLIENTS)]
                asked += more
                outcomes += clients.map(lambda one: one[0].by(client), more)
        for (ask, answer), outcome in zip(asked, outcomes, strict=True):
            if outcome.ending not in allowed:
                check_outcome(ask, answer, outcome)
        return outcomes

    def until_recovered(self, strikes: Sequence[Strike], restarts: dict[str, float]) -> None:
        """Whoever had to be is started again, and all serve."""
        due = {s.victim for s in strikes if s.attack.is_deadly and s.victim != DAEMON}
        eventually(
            lambda: all(self._restarts().get(v, 0) > restarts.get(v, 0) for v in due),
            BACK_WITHIN_S,
            f"{due} started again:\n{self.service.log[-3000:]}",
        )
        eventually(
            lambda: self.metric("distserve_instance_up") == len(self.instances),
            BACK_WITHIN_S,
            f"all up again:\n{self.service.log[-3000:]}",
        )

    def until_at_rest(self) -> None:
        counts = self.service.counts
        eventually(
            lambda: all(c["held"] == c["in_use"] == 0 < c["free"] for c in counts().values()),
            FREE_WITHIN_S,
            f"all blocks free: {counts()}",
        )
        eventually(
            lambda: self.metric("vllm:num_requests_running") == 0, FREE_WITHIN_S, "nothing runs"
        )

    def check_remains(self) -> None:
        """No orphan, no descriptor, no memory, no file more than before."""
        for order in self.orders.iterdir():
            order.unlink()
        if self._base is None:
            self._base = self.snapshot()
        base = self._base
        eventually(lambda: len(self.daemon.children()) == len(self.instances), 10, "no orphans")
        eventually(
            lambda: all(
                count <= base.descriptors.get(pid, max(base.descriptors.values()))
                for pid, count in self.snapshot().descriptors.items()
            ),
            FREE_WITHIN_S,
            f"descriptors back to {base.descriptors}: {self.snapshot().descriptors}",
        )
        now = self.snapshot()
        assert now.memory_bytes <= base.memory_bytes + MAX_GROWTH_BYTES
        assert now.run_dir == base.run_dir
        assert self.count("audit_failures") == 0

    def snapshot(self) -> Snapshot:
        processes = [self.daemon, *self.daemon.children()]
        return Snapshot(
            descriptors={process.pid: process.num_fds() for process in processes},
            memory_bytes=self.daemon.memory_info().rss,
            run_dir=frozenset(os.listdir(self.service.run_dir)),
        )

    def metric(self, name: str) -> float:
        """Its sum over all labels."""
        return sum(value for _, value in self._samples(name))

    def count(self, name: str) -> float:
        return sum(counts.get(name, 0) for counts in self.service.counts().values())

    def _restarts(self) -> dict[str, float]:
        return {
            labels["instance"]: value
            for labels, value in self._samples("distserve_instance_restarts_total")
        }

    def _samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for family in text_string_to_metric_families(httpx.get(f"{self.service.url}/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value

    def _some_leave(self, dice: random.Random, ask: Ask, answer: Answer) -> tuple[Ask, Answer]:
        if ask.streams and dice.random() < LEAVE_SHARE:
            ask = msgspec.structs.replace(ask, leaves_after=dice.randrange(20))
        return ask, answer


def check_outcome(ask: Ask, answer: Answer, outcome: Outcome) -> None:
    """One ending each, and the right one."""
    if ask.leaves_after is not None and outcome.ending is Ending.LEFT:
        return
    assert outcome.ending is Ending.ANSWERED, (ask, outcome)
    assert outcome.answer == answer, ask


@contextmanager
def striking(
    strikes: Sequence[Strike], service: Service, orders: Path
) -> Iterator[Callable[[], bool]]:
    """Strike in time while the body runs, each in a thread of its own; yields whether all is over
    (but for orders that nobody has taken yet)."""
    failures: list[BaseException] = []

    def one(what: Strike) -> None:
        time.sleep(what.after_s)
        try:
            strike(what.attack, service, what.victim, orders)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(what,)) for what in strikes]
    for thread in threads:
        thread.start()
    try:
        yield lambda: not any(thread.is_alive() for thread in threads)
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


@contextmanager
def under_attack(
    model: Path, orders: Path, *flags: str, injected: Sequence[Path] = (INJECTED,)
) -> Iterator[Service]:
    """A service whose processes take orders."""
    path = os.pathsep.join([*map(str, injected), *filter(None, [os.environ.get("PYTHONPATH")])])
    with serving(model, *FLAGS, *flags, PYTHONPATH=path, CHAOS_DIR=str(orders)) as service:
        num_instances = len(set(re.findall(r"(\S+)/0\.0 started, process", service.log)))
        eventually(
            lambda: service.log.count("is ready: loaded") >= num_instances, BACK_WITHIN_S, "all up"
        )
        yield service


def spread(attacks: Sequence[tuple[Attack, str]], within_s: float, seed: int) -> list[Strike]:
    """At random moments."""
    dice = random.Random(seed)
    return [Strike(attack, victim, dice.uniform(0, within_s)) for attack, victim in attacks]
