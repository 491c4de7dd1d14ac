"""A client that leaves is noticed wherever its request is: the real controller behind real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest

from daemon.frontend.app import build_app
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import CHAT, COMPLETIONS, HELLO, HI_CHAT, LIMITS, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.frontend.raw_http import HEALTH, post, wire_to
from tests.daemon.mute import MuteHouse


@pytest.fixture
def house(tokenizer: Tokenizer) -> MuteHouse:
    return MuteHouse(tokenizer)


@pytest.fixture
async def served(house: MuteHouse, tokenizer: Tokenizer) -> AsyncIterator[Service]:
    service = Service(tokenizer, reply=REPLY, limits=LIMITS)
    service.app = build_app(
        house.controller, service.model, service.readiness, lambda: ("", b""), LIMITS
    )
    async with service.running():
        yield service


def queued(house: MuteHouse) -> None:
    """It waits at its prefill instance."""


def prefilled(house: MuteHouse) -> None:
    """Its blocks wait to be pulled."""
    house.prefilled(house.prefills()[0], 0.0, 0.1)


def decoding(house: MuteHouse) -> None:
    prefilled(house)
    house.pulled(house.decodes()[0])
    house.token(house.decodes()[0])


PHASES = {"prefill": queued, "handoff": prefilled, "decode": decoding}


@pytest.mark.parametrize("reach", PHASES.values(), ids=PHASES.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_leaves_in_any_phase_aborts_its_request_F14_A3(
    house: MuteHouse, served: Service, reach: Callable[[MuteHouse], None], stream: bool, how: str
) -> None:
    async with wire_to(served.port) as wire:
        await wire.send(post(COMPLETIONS, json.dumps(HELLO | {"stream": stream}).encode()))
        await house.has_sent.wait()
        reach(house)
        phase = next(name for name, each in PHASES.items() if each is reach)
        assert house.controller.count_phases()[phase] == 1
        if how == "close":
            wire.writer.close()
        elif how == "reset":
            wire.writer.transport.abort()
        else:
            wire.writer.write_eof()
        await house.controller.until_idle()
    holder, command = ("p0", house.prefills()[0]) if reach is queued else ("d0", house.decodes()[0])
    assert house.aborted(holder) == [command.request_id]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_for_which_no_instance_is_up_is_left_like_any_F14(
    house: MuteHouse, served: Service, stream: bool
) -> None:
    async with wire_to(served.port) as wire:
        await wire.send(post(COMPLETIONS, json.dumps(HELLO | {"stream": stream}).encode()))
        await house.has_sent.wait()
        house.down("d0")
        prefilled(house)
        assert house.controller.count_phases()["handoff"] == 1
    await house.controller.until_idle()


async def test_a_hundred_clients_that_leave_as_their_prefill_ends_leave_nothing_A3(
    house: MuteHouse, served: Service
) -> None:
    for index in range(100):
        house.has_sent.clear()
        async with wire_to(served.port) as wire:
            await wire.send(post(CHAT, json.dumps(HI_CHAT | {"stream": True}).encode()))
            await house.has_sent.wait()
            if index % 2:
                wire.writer.close()
            house.prefilled(house.prefills()[-1], 0.0, 0.1)
        await house.controller.until_idle()
    assert house.controller.num_open == 0


async def test_the_same_name_twice_at_once_is_two_requests_E13_E14(
    house: MuteHouse, served: Service
) -> None:
    body = json.dumps(HELLO).encode()
    async with wire_to(served.port) as one, wire_to(served.port) as other:
        await one.send(post(COMPLETIONS, body, "x-request-id: same"))
        await other.send(post(COMPLETIONS, body, "x-request-id: same"))
        while len(house.prefills()) < 2:
            house.has_sent.clear()
            await house.has_sent.wait()
        first, second = house.prefills()
        assert first.request_id != second.request_id
        one.writer.close()
        await asyncio.wait_for(left_by_one(house), 10)
        await other.send(HEALTH)
    await house.controller.until_idle()
    assert sorted(house.aborted("p0")) == sorted([first.request_id, second.request_id])


async def left_by_one(house: MuteHouse) -> None:
    while not house.aborted("p0"):
        house.has_sent.clear()
        await house.has_sent.wait()
    assert house.controller.num_open == 1
