"""A whole control plane in one thread: the real controller and schedulers, scripted engines.

Commands and events travel in numbered frames, as on the real link, and are delivered in an order
that a seed decides, so that every interleaving of messages, steps, aborts and deaths can
be tried. Only processes, sockets and arithmetic are left out.
"""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

from daemon.admission import Capacity
from daemon.client_call import ClientCall
from daemon.controller import Controller
from daemon.deadlines import TimeLimits
from daemon.door import Door, Target
from daemon.errors import ServeError
from daemon.generation import Delta, GenerationSpec
from daemon.instances import Instance
from daemon.metrics import Metrics
from daemon.text import Tokenizer
from ipc.messages import Command, PeerDown
from ipc.sockets import PeerGone
from ipc.vocabulary import Role, SamplingParams
from tests.daemon.metric_samples import spec_of
from tests.end_to_end.wire import Wire
from tests.gpu_workers.rig import Rig
from tests.gpu_workers.scripted_engine import scripted_token

MAX_CONTEXT = 64


class House:
    """One instance: its rig and the link to it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.wire = Wire(rig.epoch)
        self.is_dead = False

    def post(self, command: Command) -> None:
        if self.is_dead:
            raise PeerGone(self.rig.name)
        self.wire.post(command)

    def act(self) -> None:
        """Read the mail, take one step, send what came of it."""
        for command in self.wire.take_commands():
            self.rig.tell(command)
        self.rig.step()
        for event in self.rig.take_events():
            self.wire.tell(event)


class Client:
    """Reads its stream to the end, or leaves before."""

    def __init__(self, call: ClientCall, specs: list[GenerationSpec]) -> None:
        self.call = call
        self.specs = specs
        self.deltas: list[Delta] = []
        self.error: ServeError | None = None
        self.has_left = False

    def read(self) -> None:
        stream = self.call._stream
        self.deltas += stream._pending
        stream._pending = []
        self.error = stream._error

    def leave(self) -> None:
        self.has_left = True
        self.call.__exit__(None, None, None)

    @property
    def is_over(self) -> bool:
        return self.has_left or self.call._stream.is_finished

    def tokens(self, choice: int) -> list[int]:
        return [t for d in self.deltas if d.choice == choice for t in d.token_ids]

    def expected(self, choice: int) -> list[int]:
        """The whole answer of a choice, from the prompt alone."""
        num_choices = self.specs[0].num_choices
        spec = self.specs[choice // num_choices]
        return [
            scripted_token(spec.prompt, choice % num_choices, i)
            for i in range(spec.sampling.max_tokens)
        ]


class Town:
    """The daemon's controller and its instances."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        roles: dict[str, Role],
        *,
        seed: int = 0,
        max_queued: int = 1000,
        target: Target | None = None,
        time_limits: TimeLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_context: int = MAX_CONTEXT,
        make_rig: Callable[[Role, str, int], Rig] | None = None,
        **rig: int,
    ) -> None:
        """`make_rig` gives an instance's rig by role, name and epoch; else it is a scripted one."""
        self.random = random.Random(seed)
        self.controller = Controller(
            tokenizer,
            Metrics("test"),
            Door(Capacity(max_context), max_queued=max_queued, target=target),
            time_limits=time_limits,
            clock=clock,
        )
        self._roles = roles
        self._make_rig = make_rig or (
            lambda role, name, epoch: Rig(role, name=name, epoch=epoch, **rig)
        )
        self.houses: dict[str, House] = {}
        self.clients: list[Client] = []
        self._epochs = 0
        for name in roles:
            self.build(name)

    def build(self, name: str) -> House:
        """Bring an instance up, as the supervisor does: pools introduced, then announced."""
        self._epochs += 1
        role = self._roles[name]
        house = self.make_house(self._make_rig(role, name, self._epochs))
        for other in self.houses.values():
            other.rig.connect(house.rig)
            house.rig.connect(other.rig)
        self.houses[name] = house
        self.controller.instance_up(
            Instance(spec_of(name, role), self._epochs, house.rig.layout, house.post)
        )
        return house

    def make_house(self, rig: Rig) -> House:
        return House(rig)

    def add(self, name: str, role: Role) -> None:
        """One more instance."""
        self._roles = self._roles | {name: role}
        self.build(name)

    def kill(self, name: str) -> None:
        """A worker dies: what it has not sent is lost; then it is reaped and announced."""
        house = self.houses.pop(name)
        house.is_dead = True
        for other in self.houses.values():
            with contextlib.suppress(PeerGone):  # one that has died too, and is reaped next
                other.post(PeerDown(name, house.rig.epoch))
        self.controller.instance_down(name, house.rig.epoch, "killed by SIGKILL")
        house.rig.close()

    def ask(self, *specs: GenerationSpec) -> Client:
        client = Client(self.controller.submit(specs), list(specs))
        self.clients.append(client)
        return client

    def tick(self) -> None:
        """Somebody does something: a house takes a step, or a letter reaches the controller."""
        house = self.random.choice(list(self.houses.values()))
        if house.wire.up and self.random.random() < 0.7:
            self.deliver(house)
        else:
            house.act()
        for client in self.clients:
            client.read()

    def deliver(self, house: House) -> None:
        """The oldest event of a house reaches the controller."""
        event = house.wire.take_event()
        self.controller.on_event(house.rig.name, house.rig.epoch, event)  # type: ignore[arg-type]

    def settle(self, max_ticks: int = 50_000) -> None:
        """Until every client is served and every mailbox is empty."""
        quiet = 0
        for _ in range(max_ticks):
            self.tick()
            busy = any(h.wire.down or h.wire.up for h in self.houses.values())
            done = all(client.is_over for client in self.clients)
            quiet = 0 if busy or not done else quiet + 1
            if quiet > 20 * len(self.houses):
                return
        raise AssertionError("the town never came to rest")

    def close(self) -> None:
        for house in self.houses.values():
            house.rig.close()

    def check_all_free(self) -> None:
        for house in self.houses.values():
            assert house.rig.is_all_free, f"{house.rig.name} holds blocks"
            assert house.rig.num_sequences == 0, f"{house.rig.name} has sequences"
        assert self.controller.num_open == 0
        for instance in self.controller.instances:
            assert not instance.queued, f"{instance.name} is thought to have a queue"
            assert instance.sequences == {}, f"{instance.name} is thought to decode"


def spec(prompt: list[int], *, max_tokens: int = 8, num_choices: int = 1) -> GenerationSpec:
    return GenerationSpec(
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        num_choices=num_choices,
    )


def tokenizer_of(directory: Path, text: str) -> Tokenizer:
    """A tokenizer from the text of a `tokenizer.json`."""
    (directory / "tokenizer.json").write_text(text)
    (directory / "config.json").write_text("{}")
    return Tokenizer.from_directory(directory)
