"""An instance that is to be replaced gets nothing new and finishes what it has."""

import asyncio

import pytest

from daemon.errors import NotReady
from daemon.text import Tokenizer
from ipc.vocabulary import Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import Client, Town, spec, tokenizer_of

DISAGGREGATED = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO_AND_TWO = DISAGGREGATED | {"p1": Role.PREFILL, "d1": Role.DECODE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


def assert_answered(client: Client) -> None:
    assert client.error is None
    assert client.tokens(0) == client.expected(0)


async def drained(town: Town, waiting: "asyncio.Task[bool]") -> None:
    while not waiting.done():
        town.tick()
        await asyncio.sleep(0)
    assert await waiting


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_a_draining_instance_finishes_what_it_has_and_its_like_takes_the_rest_B24_B25(
    tokenizer: Tokenizer, name: str
) -> None:
    town = Town(tokenizer, TWO_AND_TWO, seed=4)
    before = [town.ask(spec([i, 2, 3], max_tokens=20)) for i in range(8)]
    for _ in range(20):
        town.tick()
    waiting = asyncio.ensure_future(town.controller.drain_instance(name))
    await asyncio.sleep(0)
    counters = town.houses[name].rig.scheduler.counters
    after = [town.ask(spec([i, 7, 8], max_tokens=20)) for i in range(8)]
    await drained(town, waiting)
    town.houses[name].act()  # the last release is still in its mailbox
    assert town.houses[name].rig.is_all_free
    done = (counters.num_pulls, counters.prefill_steps)
    town.settle()
    assert (counters.num_pulls, counters.prefill_steps) == done
    for client in (*before, *after):
        assert_answered(client)
    assert all(trip.num_retries == 0 for c in before for trip in c.call.requests[0].trips)
    town.check_all_free()


async def test_an_idle_instance_is_drained_at_once_and_can_be_taken_back(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    await asyncio.wait_for(town.controller.drain_instance("d0"), 1)
    with pytest.raises(NotReady):
        town.ask(spec([1, 2]))
    town.controller.undrain_instance("d0")
    client = town.ask(spec([1, 2]))
    town.settle()
    assert_answered(client)


async def test_who_waits_for_a_drained_instance_hears_that_it_was_taken_back(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2]))
    waiting = asyncio.ensure_future(town.controller.drain_instance("p0"))
    await asyncio.sleep(0)
    assert not waiting.done()
    town.controller.undrain_instance("p0")
    assert not await asyncio.wait_for(waiting, 1)
    town.settle()
    assert_answered(client)


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_while_the_only_one_of_its_role_is_replaced_requests_are_taken_and_wait(
    tokenizer: Tokenizer, name: str
) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    instances = town.controller.instances
    instance = instances.get(name)
    assert instance is not None
    instances.promised[name] = instance.spec
    await asyncio.wait_for(town.controller.drain_instance(name), 1)
    early = town.ask(spec([1, 2]))
    town.kill(name)
    late = town.ask(spec([3, 4]))
    for _ in range(20):
        town.tick()
    assert not late.is_over
    town.build(name)
    instances.promised.clear()
    town.settle()
    for client in (early, late):
        assert_answered(client)
    town.check_all_free()


async def test_the_death_of_a_draining_instance_ends_the_waiting(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, TWO_AND_TWO)
    clients = [town.ask(spec([i, 2, 3], max_tokens=20)) for i in range(4)]
    waiting = asyncio.ensure_future(town.controller.drain_instance("p0"))
    await asyncio.sleep(0)
    town.kill("p0")
    await asyncio.wait_for(waiting, 1)
    town.build("p0")
    town.settle()
    for client in clients:
        assert_answered(client)
