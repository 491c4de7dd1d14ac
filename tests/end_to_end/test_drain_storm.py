"""Drains, deaths that are noticed late, leavers and time limits, in any order a seed can make."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from daemon.deadlines import TimeLimits
from daemon.errors import ServeError
from daemon.text import Tokenizer
from ipc.messages import PeerDown
from ipc.sockets import PeerGone
from ipc.vocabulary import Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import House, Town, spec, tokenizer_of

TOPOLOGIES = {
    "2P+2D": {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE},
    "1P+1M": {"p0": Role.PREFILL, "m0": Role.MIXED},
    "1M+1D": {"m0": Role.MIXED, "d0": Role.DECODE},
}
LIMITS = TimeLimits(queue_s=30.0, request_s=200.0, outage_s=20.0)
EVENTS = (
    ["ask"] * 6 + ["leave", "crash", "bury", "build", "build", "drain", "undrain"] + ["tick"] * 10
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


class Storm(Town):
    """A town whose clock runs, and whose dead are buried later than they die."""

    def __init__(self, tokenizer: Tokenizer, roles: dict[str, Role], seed: int) -> None:
        self.now_s = 0.0
        super().__init__(
            tokenizer, roles, seed=seed, time_limits=LIMITS, clock=lambda: self.now_s, num_blocks=24
        )
        self.unburied: dict[str, House] = {}
        self.buried: list[str] = []
        self.drains: list[asyncio.Future[bool]] = []

    def tick(self) -> None:
        self.now_s += 0.2 * self.random.random()
        self.controller.timekeeper.look()
        if self.houses:
            super().tick()

    def crash(self) -> None:
        name = self.random.choice(list(self.houses))
        house = self.unburied[name] = self.houses.pop(name)
        house.is_dead = True

    def bury(self) -> None:
        name = self.random.choice(list(self.unburied))
        house = self.unburied.pop(name)
        for other in self.houses.values():
            with contextlib.suppress(PeerGone):
                other.post(PeerDown(name, house.rig.epoch))
        self.controller.instance_down(name, house.rig.epoch, "killed by SIGKILL")
        house.rig.close()
        self.buried.append(name)

    def happen(self, what: str) -> None:
        """Nothing, where there is nobody for it to happen to."""
        match what:
            case "ask":
                prompt = [self.random.randrange(200) for _ in range(self.random.randrange(1, 20))]
                with contextlib.suppress(ServeError):
                    num_choices = self.random.choice([1, 1, 3])
                    self.ask(spec(prompt, max_tokens=12, num_choices=num_choices))
            case "leave" if self.clients:
                self.random.choice(self.clients).leave()
            case "crash" if self.houses:
                self.crash()
            case "bury" if self.unburied:
                self.bury()
            case "build" if self.buried:
                self.build(self.buried.pop())
            case "drain" if self.houses:
                name = self.random.choice(list(self.houses))
                self.drains.append(asyncio.ensure_future(self.controller.drain_instance(name)))
            case "undrain" if self.houses:
                self.controller.undrain_instance(self.random.choice(list(self.houses)))
            case _:
                self.tick()

    def calm(self) -> None:
        """Everybody comes back and may serve."""
        while self.unburied:
            self.bury()
        for name in self.buried:
            self.build(name)
        for name in self.houses:
            self.controller.undrain_instance(name)


def wrong_tokens(town: Storm) -> Iterator[tuple[list[int], list[int]]]:
    """What clients have that differs from an undisturbed answer, beside that answer's beginning."""
    for client in town.clients:
        for choice in range(client.specs[0].num_choices):
            has, whole = client.tokens(choice), client.expected(choice)
            is_answered = not client.has_left and client.error is None
            if has != (whole if is_answered else whole[: len(has)]):
                yield has, whole


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_every_answer_is_right_or_an_error_and_nothing_is_left(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    town = Storm(tokenizer, TOPOLOGIES[topology], seed)
    for _ in range(300):
        town.happen(town.random.choice(EVENTS))
        await asyncio.sleep(0)  # whoever waits for a drain begins, or hears of its end
    town.calm()
    town.settle()
    assert list(wrong_tokens(town)) == []
    assert any(client.error is None for client in town.clients if not client.has_left)
    town.check_all_free()
    await asyncio.sleep(0)
    assert all(drain.done() for drain in town.drains)
