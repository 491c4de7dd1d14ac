"""A town in which things go wrong, with a supervisor who does what the real one does.

An incarnation whose link broke or whose process ended is reaped some time later, announced, and
built again; messages to it meanwhile are refused or lost. The real heartbeat asks and judges them
by a clock that ticks. Whatever is decided, a seed decides.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from daemon.errors import NotReady
from daemon.heartbeat import BEAT_S, Heartbeat
from daemon.metrics import Metrics
from daemon.supervisor import Supervisor
from daemon.text import Tokenizer
from ipc.codec import WireError
from ipc.messages import Audit, Command, Event, Stats, Tokens
from ipc.sockets import PeerGone
from ipc.vocabulary import InstanceSpec, Parallelism, Role, WorkerName
from tests.chaos.chaos_rig import ChaosRig
from tests.chaos.faults import MEDDLING, Fault
from tests.chaos.load import Visit
from tests.end_to_end.town import MAX_CONTEXT, Client, House, Town
from tests.end_to_end.wire import Frames, Mailbox
from tests.gpu_workers.rig import Rig

MAX_DOWN_TICKS = 150
TICK_S = 0.01
BEAT_TICKS = int(BEAT_S / TICK_S)
WEDGED_AFTER_S = 10.0  # many acts of a slow house
SLOWNESS = 10


class Ghost(NamedTuple):
    """An event of a dead incarnation that is still under way."""

    instance: str
    epoch: int
    event: Event | Tokens


class ChaosHouse(House):
    """Tells its books when it is asked, and when it has nothing else to do, as a leader does."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.last_events: list[Event | Tokens] = []
        self.is_idle = False
        self.is_frozen = False
        self.is_deaf = False  # once dead: whether what is sent is lost, or refused
        self._told: Stats | None = None
        self._beat = 0

    def post(self, command: Command) -> None:
        if self.is_dead and self.is_deaf:
            return
        super().post(command)

    def act(self) -> None:
        """Raises WireError: what came is not what was sent, and the process ends."""
        if self.is_frozen:
            return
        commands = self.wire.take_commands()
        for command in commands:
            if isinstance(command, Audit):
                self._beat, self._told = command.beat, None
            else:
                self.rig.tell(command)
        has_acted = self.rig.step()
        for event in self.rig.take_events():
            self.wire.tell(event)
        self.is_idle = not has_acted and not commands
        if (self.is_idle or self._told is None) and self._told != (stats := self._stats()):
            self._told = stats
            self.wire.tell(stats)

    @property
    def is_at_rest(self) -> bool:
        return self.is_idle and not (self.wire.down or self.wire.up)

    def _stats(self) -> Stats:
        scheduler, pool = self.rig.scheduler, self.rig.scheduler.pool
        return Stats(
            num_steps=scheduler.counters.num_steps,
            num_pulls=scheduler.counters.num_pulls,
            num_waiting=scheduler.prefills.num_waiting + scheduler.decodes.num_waiting,
            num_running=scheduler.decodes.num_running,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_held=pool.num_held,
            blocks_in_use=pool.num_in_use,
            audit_failures=len(scheduler.audit()),
            beat=self._beat,
        )


class Life:
    """What the heartbeat sees of a house."""

    def __init__(self, town: "ChaosTown", house: House) -> None:
        self.epoch = house.rig.epoch
        self.spec = InstanceSpec(house.rig.name, Role.MIXED, Parallelism(), ())
        self.workers_here = [WorkerName(house.rig.name)]
        self._town, self._house = town, house

    def ask(self, beat: int) -> None:
        with contextlib.suppress(PeerGone):
            self._house.post(Audit(beat))

    def doom(self, reason: str) -> None:
        self._town.kill(self._house.rig.name)


class ChaosTown(Town):
    """See the module's docstring. `strikes` are the faults to come, and when."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        roles: dict[str, Role],
        *,
        seed: int,
        make_rig: Callable[[Role, str, int], Rig] | None = None,
        max_context: int = MAX_CONTEXT,
        num_blocks: dict[str, int] | None = None,
    ) -> None:
        self.now = 0
        self.num_deaths = 0
        self._seed = seed
        self._pool_sizes = num_blocks or {}
        self._to_strike: list[tuple[int, Fault, str]] = []
        self._to_build: dict[str, int] = {}
        self._slow: set[str] = set()
        self._ghosts: list[Ghost] = []
        self._is_haunted: set[str] = set()
        self._old_mail: dict[str, Mailbox] = {}
        self._held_back: dict[int, Frames] = {}
        super().__init__(
            tokenizer, roles, seed=seed, make_rig=make_rig or self._rig, max_context=max_context
        )
        self._heartbeat = Heartbeat(
            cast(Supervisor, self),
            self.controller.instances,
            Metrics("test"),
            wedged_after_s=WEDGED_AFTER_S,
            clock=lambda: self.now * TICK_S,
        )

    def watched_lives(self) -> list[Life]:
        """The supervisor's, for the heartbeat: it does not know yet who has just died."""
        return [Life(self, house) for house in self.houses.values()]

    def _rig(self, role: Role, name: str, epoch: int) -> Rig:
        num_blocks = self._pool_sizes.get(name, 64)
        return ChaosRig(role, seed=self._seed, name=name, epoch=epoch, num_blocks=num_blocks)

    def strike(self, fault: Fault, victim: str, at: int) -> None:
        """Let something happen to an instance from that tick on, as soon as it can."""
        self._to_strike.append((at, fault, victim))

    def visit(self, visits: list[Visit]) -> None:
        """All calls come, wait outside while the house is closed, and some of them leave."""
        leaving: list[tuple[int, Client]] = []
        for visit in visits:
            for _ in range(visit.gap):
                self.tick()
            client = self._enter(visit)
            if visit.leaves_after is not None:
                leaving.append((self.now + visit.leaves_after, client))
            for due, one in leaving:
                if due <= self.now and not one.has_left:
                    one.leave()
        for due, one in sorted(leaving, key=lambda item: item[0]):
            while self.now < due:
                self.tick()
            if not one.has_left:
                one.leave()

    def tick(self) -> None:
        self.now += 1
        for name in [n for n, due in self._to_build.items() if due <= self.now]:
            del self._to_build[name]
            self.build(name)
        self._to_strike = [strike for strike in self._to_strike if not self._try(*strike)]
        self._haunt()
        if self.houses:
            self._somebody_acts(self.random.choice(list(self.houses.values())))
        for client in self.clients:
            client.read()
        if self.now % BEAT_TICKS == 0:
            self._heartbeat.beat()

    def kill(self, name: str) -> None:
        self.num_deaths += 1
        house: Any = self.houses[name]
        self._old_mail[name] = house.wire.down
        if name in self._is_haunted:
            self._ghosts += [Ghost(name, house.rig.epoch, e) for e in house.last_events]
        super().kill(name)
        self._to_build[name] = self.now + self.random.randrange(MAX_DOWN_TICKS)

    def settle(self, max_ticks: int = 30_000) -> None:
        """Until everybody is served and has nothing left to say, and nothing more comes of asking
        all instances how they are."""
        deadline = self.now + max_ticks
        self._until_rest(deadline)
        self._to_strike.clear()
        self._heartbeat.beat()
        self._until_rest(deadline)

    def _until_rest(self, deadline: int) -> None:
        while self.now < deadline:
            self.tick()
            if self._is_settled:
                return
        raise AssertionError("the town never came to rest")

    def make_house(self, rig: Rig) -> House:
        return ChaosHouse(rig)

    @property
    def _living(self) -> list[ChaosHouse]:
        houses = cast(list[ChaosHouse], list(self.houses.values()))
        return [house for house in houses if not (house.is_dead or house.is_frozen)]

    @property
    def _is_settled(self) -> bool:
        return (
            all(client.is_over for client in self.clients)
            and not (self._to_build or self._ghosts)
            and len(self._living) == len(self._roles)
            and all(house.is_at_rest for house in self._living)
        )

    def _enter(self, visit: Visit) -> Client:
        while True:
            try:
                return self.ask(*visit.specs)
            except NotReady:
                self.tick()

    def _somebody_acts(self, house: House) -> None:
        name = house.rig.name
        if house.is_dead:
            self.kill(name)
        elif house.wire.up and self.random.random() < 0.7:
            try:
                self.deliver(house)
            except WireError:
                self.kill(name)
        elif name not in self._slow or not self.random.randrange(SLOWNESS):
            try:
                house.act()
            except WireError:
                self._die(house)

    def deliver(self, house: House) -> None:
        assert isinstance(house, ChaosHouse)
        event: Any = house.wire.take_event()
        house.last_events = [*house.last_events[-9:], event]
        if isinstance(event, Stats):
            self._heartbeat.answered((WorkerName(house.rig.name), house.rig.epoch), event.beat)
        self.controller.on_event(house.rig.name, house.rig.epoch, event)

    def _try(self, at: int, fault: Fault, victim: str) -> bool:
        """Whether it has happened, or is on its way."""
        house = self.houses.get(victim)
        if self.now < at or house is None or house.is_dead:
            return False
        match fault:
            case Fault.DEATH:
                self._die(house)
            case Fault.FROZEN:
                assert isinstance(house, ChaosHouse)
                house.is_frozen = True
            case Fault.SLOW:
                self._slow.add(victim)
            case Fault.PRESSURE:
                pass  # the pools were made small
            case Fault.STALE_UP:
                self._is_haunted.add(victim)
                self._die(house)
            case Fault.STALE_DOWN:
                return self._send_stale(house)
            case _:
                mailbox = house.wire.up if fault.name.endswith("UP") else house.wire.down
                if fault.is_reordering:
                    return self._delay(house, mailbox)
                return MEDDLING[fault](mailbox, self.random)
        return True

    def _delay(self, house: House, mailbox: Mailbox) -> bool:
        """Hold a message back until the next one has overtaken it."""
        if not mailbox:
            return False
        if (held := self._held_back.pop(house.rig.epoch, None)) is not None:
            mailbox.append(held)
            return True
        self._held_back[house.rig.epoch] = mailbox.pop()
        return False

    def _send_stale(self, house: House) -> bool:
        """A command to the incarnation before; one must have died for that."""
        if old := self._old_mail.get(house.rig.name):
            house.wire.down.append(old[0])
            return True
        if house.wire.down:
            self._die(house)
        return False

    def _die(self, house: House) -> None:
        """Its process is gone; nobody knows yet."""
        assert isinstance(house, ChaosHouse)
        house.is_dead, house.is_deaf = True, self.random.random() < 0.5

    def _haunt(self) -> None:
        """Events of a dead incarnation come in while its successor is at work."""
        for ghost in list(self._ghosts):
            if ghost.instance in self.houses and self.random.random() < 0.05:
                self._ghosts.remove(ghost)
                event: Any = ghost.event
                self.controller.on_event(ghost.instance, ghost.epoch, event)
