"""The controller and instances of several ranks together, over every order that a seed can make.

Any rank may lag behind: its copies then run long after those of the others, and the blocks they
read must be there still.
"""

from collections.abc import Callable
from typing import Any

import pytest

from daemon.text import Tokenizer
from gpu_workers.step_plan import Pull
from ipc.vocabulary import FinishReason, Parallelism, Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import Client, Town, spec, tokenizer_of
from tests.gpu_workers.group_rig import GroupRig

SHAPES = {"p0": Parallelism(2, 1), "d0": Parallelism(1, 2), "m0": Parallelism(2, 2)}
DISAGGREGATED = {"p0": Role.PREFILL, "d0": Role.DECODE}
TOPOLOGIES = {
    "tp2+pp2": DISAGGREGATED,
    "mixed tp2 pp2": {"m0": Role.MIXED},
    "tp2+pp2+mixed": DISAGGREGATED | {"m0": Role.MIXED},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


def build(tokenizer: Tokenizer, topology: str, seed: int, **limits: int) -> Town:
    """A town of groups, whose copies check that what they read is still there."""
    town: Town

    def make_rig(role: Role, name: str, epoch: int) -> GroupRig:
        rig = GroupRig(role, SHAPES[name], seed=seed, name=name, epoch=epoch, **limits)
        for exchange in rig.exchanges:
            exchange.begin = checked(exchange.begin, lambda: town)  # type: ignore[method-assign]
        return rig

    town = Town(tokenizer, TOPOLOGIES[topology], seed=seed, make_rig=make_rig)
    return town


def checked(begin: Callable[[Pull], None], town: Callable[[], Town]) -> Callable[[Pull], None]:
    def checking(pull: Pull) -> None:
        house = town().houses.get(pull.handle.owner)
        if house is not None and house.rig.epoch == pull.handle.epoch:
            pool: Any = house.rig.pool
            held = pool._held.get(pull.handle.request_id)
            assert held == pull.handle.block_ids, "a copy reads blocks that were given back"
        begin(pull)

    return checking


def assert_answered(client: Client) -> None:
    for choice in range(sum(s.num_choices for s in client.specs)):
        assert client.tokens(choice) == client.expected(choice)
        assert [d.finished for d in client.deltas if d.choice == choice and d.finished] == [
            FinishReason.LENGTH
        ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_everybody_gets_the_whole_answer_B6_B20(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    town = build(tokenizer, topology, seed)
    for i in range(20):
        prompt = [town.random.randrange(200) for _ in range(town.random.randrange(1, 40))]
        town.ask(spec(prompt, max_tokens=1 + i % 12, num_choices=1 + i % 3))
        town.tick()
    town.settle()
    for client in town.clients:
        assert_answered(client)
    town.check_all_free()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_at_any_moment_leave_nothing_behind_A6_A13(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    town = build(tokenizer, topology, seed, num_blocks=40)
    for i in range(30):
        prompt = [town.random.randrange(200) for _ in range(town.random.randrange(1, 40))]
        town.ask(spec(prompt, max_tokens=10, num_choices=1 + i % 2))
        for _ in range(town.random.randrange(20)):
            town.tick()
        if town.random.random() < 0.5:
            town.random.choice(town.clients).leave()
    town.settle()
    for client in town.clients:
        if not client.has_left:
            assert_answered(client)
    town.check_all_free()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(2))
def test_pools_under_pressure_preempt_and_still_answer_everybody_B20_F24(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    town = build(tokenizer, topology, seed, num_blocks=16)
    for i in range(12):
        town.ask(spec(list(range(i, i + 10)), max_tokens=40))
    town.settle()
    for client in town.clients:
        assert_answered(client)
    assert sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values()) > 0
    town.check_all_free()


@pytest.mark.parametrize("victim", ["p0", "d0", "m0"])
@pytest.mark.parametrize("seed", range(3))
def test_an_instance_that_dies_with_steps_in_flight_ends_each_request_once(
    tokenizer: Tokenizer, victim: str, seed: int
) -> None:
    town = build(tokenizer, "tp2+pp2+mixed", seed)
    for i in range(20):
        prompt = [town.random.randrange(200) for _ in range(town.random.randrange(1, 40))]
        town.ask(spec(prompt, max_tokens=2 + i % 9))
    for _ in range(town.random.randrange(100, 500)):
        town.tick()
    town.kill(victim)
    town.build(victim)
    town.settle()
    for client in town.clients:
        assert (client.error is None) == (client.tokens(0) == client.expected(0))
    town.check_all_free()
