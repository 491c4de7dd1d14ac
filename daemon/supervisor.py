"""Starts every instance's workers, watches them, and starts them again when they die.

One task per instance. An instance lives and dies as a unit: when one of its processes ends, the
others are killed and reaped, and only then is it announced down and started again, as a new
epoch. Instances are replaced, added and removed on request too.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator

from daemon.announcer import Announcer
from daemon.config_errors import reason_of
from daemon.controller import Controller
from daemon.errors import ConfigError, StartFailed
from daemon.incarnation import Incarnation, Process
from daemon.metrics import Metrics
from daemon.neighbours import Neighbours
from daemon.partings import until_let_go
from daemon.quarantine import Quarantine
from daemon.ward import Ward
from daemon.worker_configs import WorkerConfigs
from daemon.worker_process import WorkerProcess
from ipc.messages import StartEvent, WorkerConfig
from ipc.sockets import DaemonSocket
from ipc.vocabulary import InstanceSpec, WorkerName

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 60.0
HEALTHY_AFTER_S = 600.0
EXIT_GRACE_S = 2.0


class Supervisor:
    """Owns all worker processes of this node.

    Until the node can serve for the first time, what cannot start ends the daemon, so that a
    mistake is seen at once; afterwards it is tried again, and the rest serves on.
    """

    def __init__(
        self,
        configs: WorkerConfigs,
        link: DaemonSocket,
        controller: Controller,
        metrics: Metrics,
        *,
        start_timeout_s: float,
        start_worker: Callable[[WorkerConfig], Awaitable[Process]] = WorkerProcess.start,
        neighbours: Neighbours | None = None,  # where instances are on other nodes too
        quarantine: Quarantine | None = None,
    ) -> None:
        self._configs = configs
        self._link = link
        self._controller = controller
        self._metrics = metrics
        self._start_timeout_s = start_timeout_s
        self._start_worker = start_worker
        self._neighbours = neighbours or Neighbours()
        self._quarantine = quarantine or Quarantine(max_deaths=0)
        self._announcer = Announcer(configs, link, controller, metrics, self._lives_up)
        self._stopping = asyncio.Event()
        self._has_served = False
        self.wards = {spec.name: Ward(spec) for spec in configs.own_instances}
        self.on_change: Callable[[], None] = lambda: None
        self._house: asyncio.TaskGroup | None = None
        self._waiters: list[asyncio.Future[None]] = []

    async def changed(self) -> None:
        """Wait until an instance moves: comes up, goes down, gets on with loading, leaves."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _has_changed(self) -> None:
        self.on_change()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def run(self) -> None:
        """Keep all instances alive until `stop`, those that are added later too.

        Raises (in a group):
            ConfigError: a worker says that it can never start.
            StartFailed: it died twice before it was ever ready.
        """
        async with asyncio.TaskGroup() as self._house:
            for ward in self.wards.values():
                self._house.create_task(self.keep(ward))
            await self._stopping.wait()

    def add(self, spec: InstanceSpec) -> Ward:
        """Start one more instance, while `run` runs; its configuration knows of it already."""
        assert self._house is not None
        ward = self.wards[spec.name] = Ward(spec)
        self._house.create_task(self.keep(ward))
        return ward

    async def replace(self, ward: Ward) -> None:
        """End its present life on purpose; the next one begins at once."""
        ward.is_replaced = ward.life is not None
        await self._let_go(ward)

    async def remove(self, ward: Ward) -> None:
        """End its present life, and with it the instance."""
        ward.is_leaving = True
        await self._let_go(ward)

    async def keep(self, ward: Ward) -> None:
        """Keep one instance alive until `stop`, or until it is removed. Raises as `run` does."""
        backoff_s = FIRST_BACKOFF_S
        while not self._is_over(ward):
            if not await self._until_reachable(ward):
                break
            started_s = time.monotonic()
            reason = await self._live(ward)
            if self._is_over(ward):
                break
            if ward.is_replaced:
                ward.is_replaced = False
                continue
            self._judge(ward, reason)
            if time.monotonic() - started_s > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            if self._is_to_be_spared(ward, reason):
                await self._until_lifted(ward)
            else:
                await self._first_of(ward, asyncio.sleep(backoff_s))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        self._promise(ward, holds=False)
        if ward.is_leaving:
            del self.wards[ward.spec.name]
            self._metrics.instance_removed(ward.spec.name)
            self._has_changed()

    async def stop(self) -> None:
        """Let every worker leave, kill what stays; `keep` reaps them and returns."""
        self._stopping.set()
        lives = [ward.life for ward in self.wards.values() if ward.life is not None]
        for life in lives:
            life.tell_to_exit()
        deadline_s = time.monotonic() + EXIT_GRACE_S
        for worker in [w for life in lives for w in life.workers.values()]:
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await worker.ended()
            except TimeoutError:
                worker.kill()

    async def _let_go(self, ward: Ward) -> None:
        """Let its workers leave by themselves; after a while they have to."""
        life = ward.life
        if life is None:  # between two lives: the waiting before the next one is cut short
            ward.cut_short.set()
            return
        life.tell_to_exit()
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                await life.until_over()
        except TimeoutError:
            life.doom("it did not leave when it was told to")

    def watched_lives(self) -> list[Incarnation]:
        """Those that should be getting on: they can serve, and are not about to end."""
        return [life for life in self._lives_up() if not life.is_ending]

    def on_event(self, worker: WorkerName, epoch: int, event: StartEvent) -> None:
        life = self._life_of(worker.instance, epoch)
        if life is None:
            return
        life.on_event(worker, event)
        self._has_changed()

    def on_broken_link(self, worker: WorkerName, epoch: int, reason: str) -> None:
        """A stream that lost a message can never be trusted again."""
        life = self._life_of(worker.instance, epoch)
        if life is not None:
            life.doom(f"its link broke: {reason}")

    def _is_over(self, ward: Ward) -> bool:
        return self._stopping.is_set() or ward.is_leaving

    async def _until_reachable(self, ward: Ward) -> bool:
        """Wait for the other nodes of the instance; False when it is over before they come."""
        while not self._is_over(ward):
            ward.waits_for = self._neighbours.trouble(ward.spec)
            if ward.waits_for is None:
                return True
            self._promise(ward, holds=False)
            self._has_changed()
            await self._first_of(ward, self._neighbours.until_joined(ward.spec))
            ward.cut_short.clear()
        return False

    async def _live(self, ward: Ward) -> str:
        """One life of an instance; why it ended. All of its processes are reaped then."""
        ward.cut_short.clear()
        life = ward.life = Incarnation(ward.spec, secrets.randbits(63), self._link)
        try:
            try:
                await self._spawn(life)
            except OSError as error:  # no descriptors, no memory: perhaps later
                life.doom(f"its processes cannot be started: {reason_of(error)}")
            if self._stopping.is_set():  # `stop` could not tell processes that were not there yet
                life.doom("the daemon stops")
            reason = await self._until_over(ward, life)
        finally:
            ward.culprit = ward.device_of(life.culprit)
            await life.bury()
            self._configs.forget(life.epoch)
            ward.life = None
        self._promise(ward, holds=life.is_up)
        if life.is_up:
            self._announce_down(life, reason)
            await until_let_go(life, self._lives_up, self.changed)
        if life.is_hopeless and not self._has_served:
            raise ConfigError(f"{ward.spec.name} cannot start: {reason}")
        return reason

    async def _until_over(self, ward: Ward, life: Incarnation) -> str:
        over = asyncio.ensure_future(life.until_over())
        ready = asyncio.ensure_future(life.until_ready())
        try:
            await asyncio.wait(
                {ready, over},
                timeout=self._start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if life.is_ready and self._announcer.suits(life):
                ward.was_ever_ready = True
                self._announce_up(life)
            elif not life.is_ready and not over.done():
                return f"not ready after {self._start_timeout_s:.0f} s"
            return await over
        finally:
            over.cancel()
            ready.cancel()

    def _judge(self, ward: Ward, reason: str) -> None:
        """Record a death; give up on what never worked."""
        logger.error("%s ended: %s", ward.spec.name, reason)
        is_lost = self._neighbours.trouble(ward.spec) is not None  # a node was: no fault of its own
        never_worked = not self._has_served and not ward.was_ever_ready and not is_lost
        if never_worked and ward.last_exit is not None:
            raise StartFailed(f"{ward.spec.name} died twice before it was ready: {reason}")
        ward.last_exit = reason
        ward.restarts += 1
        self._metrics.restarted(ward.spec.name)
        self._has_changed()

    def _is_to_be_spared(self, ward: Ward, reason: str) -> bool:
        """Whether its device has failed too often, and the others can serve without it."""
        assert ward.culprit is not None
        ward.quarantined = self._quarantine.died(ward.culprit, reason, time.monotonic())
        if ward.quarantined is None or not self._controller.instances.can_serve:
            ward.quarantined = None
            return False
        logger.error("%s stays down: %s", ward.spec.name, ward.quarantined)
        self._promise(ward, holds=False)
        self._has_changed()
        return True

    async def _until_lifted(self, ward: Ward) -> None:
        """Until the operator wants it back, or rid of it, or the others cannot serve any more."""
        while not (self._is_over(ward) or ward.cut_short.is_set()):
            if not self._controller.instances.can_serve:
                break
            await self._first_of(ward, self.changed())
        ward.quarantined = None
        self._quarantine.lift(ward.culprit or "")

    async def _first_of(self, ward: Ward, waiting: Coroutine[None, None, None]) -> None:
        """Wait, but not beyond `stop`, or beyond the word that it is to start or leave at once."""
        waits = (waiting, self._stopping.wait(), ward.cut_short.wait())
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _spawn(self, life: Incarnation) -> None:
        for name in life.names:
            self._link.open_epoch(name, life.epoch)
            config = self._configs.of(life.spec, life.epoch, name)
            where = life.spec.node_of(name)
            is_here = where == life.spec.home
            start = self._start_worker if is_here else self._neighbours[where].start
            life.join(name, await start(config))
            logger.info("%s started, process %d on %s", name, life.workers[name].pid, where)

    def _promise(self, ward: Ward, *, holds: bool) -> None:
        """Whether requests may come and wait for its next life: the first one after a life that
        could serve is sure to be tried soon; nobody knows how long it takes when that one fails."""
        returning = self._controller.instances.returning
        if holds and not self._is_over(ward):
            returning[ward.spec.name] = ward.spec
        else:
            returning.pop(ward.spec.name, None)

    def _announce_up(self, life: Incarnation) -> None:
        self._promise(self.wards[life.spec.name], holds=False)
        self._announcer.up(life)
        self._has_served = self._has_served or self._controller.instances.can_serve
        self._has_changed()

    def _announce_down(self, life: Incarnation, reason: str) -> None:
        # While we stop, the peers are leaving too.
        self._announcer.down(life, reason, tells_peers=not self._stopping.is_set())
        self._has_changed()

    def _lives_up(self) -> Iterator[Incarnation]:
        lives = (ward.life for ward in self.wards.values())
        return (life for life in lives if life is not None and life.is_up)

    def _life_of(self, instance: str, epoch: int) -> Incarnation | None:
        ward = self.wards.get(instance)
        life = ward.life if ward is not None else None
        return life if life is not None and life.epoch == epoch else None
