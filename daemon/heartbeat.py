"""The daemon's beat: asks every worker for a sign of life, and has those that are wedged replaced.

A worker answers when its step loop comes round, so an answer says that it gets on, not merely that
its process exists. What silence means is the watchdog's to say. Workers of other nodes are not
asked: when one of them hangs, its leader does.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from daemon.incarnation import Incarnation
from daemon.instances import InstanceTable
from daemon.metrics import Metrics
from daemon.supervisor import Supervisor
from daemon.watchdog import Facts, Watchdog
from ipc.sockets import Sender

BEAT_S = 1.0
BEATS_PER_BOUND = 4  # at least


class Heartbeat:
    """Judges all instances once a beat.

    Args:
        instances: what the controller knows of those that are up.
        wedged_after_s: how long one may get nowhere.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        instances: InstanceTable,
        metrics: Metrics,
        *,
        wedged_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._instances = instances
        self._metrics = metrics
        self._beat_s = min(BEAT_S, wedged_after_s / BEATS_PER_BOUND)
        self._watchdog = Watchdog(wedged_after_s, self._beat_s)
        self._clock = clock
        self._number = 0
        self._answers: dict[Sender, int] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self.still_s: dict[str, float] = {}  # for how long who is not excused got nowhere

    @property
    def num_beats(self) -> int:
        return self._number

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self.beat()

    def answered(self, worker: Sender, beat: int) -> None:
        """A worker has heard that beat."""
        self._answers[worker] = beat
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def heard(self) -> None:
        """Wait until any worker answers."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def beat(self) -> None:
        """Judge by what has been answered so far, then ask again."""
        lives = {life.epoch: life for life in self._supervisor.watched_lives()}
        self.still_s = {}
        for finding in self._watchdog.judge(self._facts(lives.values()), self._clock()):
            self._metrics.got_on(finding.instance, finding.age_s)
            if not finding.is_excused:
                self.still_s[finding.instance] = finding.age_s
            if finding.wedged is not None:
                self._metrics.wedged(finding.instance)
                lives[finding.epoch].doom(f"wedged: {finding.wedged}")
        self._answers = {who: beat for who, beat in self._answers.items() if who[1] in lives}
        self.ask()

    def ask(self) -> int:
        """Have every worker answer now; the number that its answer bears."""
        self._number += 1
        for life in self._supervisor.watched_lives():
            life.ask(self._number)
        return self._number

    def silent(self, number: int) -> list[Incarnation]:
        """Those whose leader has not answered that number yet, nor a later one."""
        return [
            life
            for life in self._supervisor.watched_lives()
            if self._answers.get((life.leader, life.epoch), 0) < number
        ]

    def _facts(self, lives: Iterable[Incarnation]) -> Iterator[Facts]:
        for life in lives:
            instance = self._instances.get(life.spec.name, life.epoch)
            if instance is not None:
                names = life.workers_here
                answers = {name: self._answers.get((name, life.epoch), 0) for name in names}
                yield Facts(
                    instance.name,
                    life.epoch,
                    answers,
                    instance.has_work,
                    instance.stats,
                    instance.queued.blocks_to_go_on,
                )
