"""What a request held is given back when it ends, not when the garbage collector comes."""

import asyncio
import gc
import json
from collections.abc import Iterator

import httpx
import pytest

from daemon.errors import WorkerFailed
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO
from tests.daemon.frontend.http_service import Service
from tests.daemon.frontend.raw_http import post, wire_to

OURS = ("daemon", "uvicorn", "tests")


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def left_to_the_collector() -> set[str]:
    """Kinds of things on the daemon's side that are held by a circle and nothing else."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kinds = {type(thing) for thing in gc.garbage}
    return {kind.__qualname__ for kind in kinds if kind.__module__.startswith(OURS)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answered_request_leaves_nothing_in_a_circle(
    service: Service, http: httpx.AsyncClient, stream: bool
) -> None:
    await http.post(COMPLETIONS, json=HELLO | {"stream": stream})
    await http.get("/health")  # over the same connection: the one before is all over
    service.submitter.generations.clear()
    assert left_to_the_collector() == set()


async def test_a_request_that_fails_before_its_first_byte_leaves_nothing_in_a_circle(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.script = lambda _: [WorkerFailed("The worker died.")]
    await http.post(COMPLETIONS, json=HELLO)
    await http.get("/health")
    service.submitter.generations.clear()
    assert left_to_the_collector() == set()


async def test_a_client_that_leaves_leaves_nothing_in_a_circle(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.submitter.script = lambda _: [asyncio.Event()]
    async with wire_to(service.port) as wire:
        await wire.send(post(COMPLETIONS, json.dumps(HELLO | {"stream": True}).encode()))
        await service.submitter.submitted.wait()
    await service.submitter.last.left.wait()
    await http.get("/health")
    service.submitter.generations.clear()
    assert left_to_the_collector() == set()
