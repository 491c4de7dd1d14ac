"""The garbage collector has little to do: what is there at the start stays, and requests leave
nothing that only it could find."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from daemon import garbage
from daemon.client_call import ClientCall
from daemon.errors import WorkerFailed
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason
from tests.daemon.mute import MuteHouse


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Nothing is collected while a test looks."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def habits() -> Iterator[None]:
    """This process goes on as it was."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("habits")
def test_what_is_there_when_the_service_is_ready_is_not_looked_at_again() -> None:
    garbage.settle()
    assert gc.get_freeze_count() > len(gc.get_objects())
    assert gc.get_threshold() == (
        garbage.YOUNG,
        garbage.YOUNG_PER_MIDDLE,
        garbage.MIDDLE_PER_FULL,
    )


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("ending", ["finished", "aborted", "failed"])
async def test_a_request_that_has_ended_is_gone_at_once(tokenizer: Tokenizer, ending: str) -> None:
    house = MuteHouse(tokenizer)
    with house.ask(10) as call:
        house.prefilled(house.prefills()[0], 0.0, 0.1)
        house.pulled(house.decodes()[0])
        house.token(house.decodes()[0])
        request = weakref.ref(call.requests[0])
        if ending == "finished":
            house.token(house.decodes()[0], FinishReason.LENGTH)
        elif ending == "failed":
            house.controller.fail_all(WorkerFailed("The worker died."))
    del call
    assert request() is None


@pytest.mark.usefixtures("by_hand")
async def test_a_request_whose_client_was_told_of_its_failure_is_gone_at_once(
    tokenizer: Tokenizer,
) -> None:
    """Its stream once kept the error, and the error the frames that led to the stream."""
    house = MuteHouse(tokenizer)
    with house.ask(10) as call:
        request = weakref.ref(call.requests[0])
        house.controller.fail_all(WorkerFailed("The worker died."))
        assert await is_told_of_a_failure(call)
    del call
    assert request() is None


async def is_told_of_a_failure(call: ClientCall) -> bool:
    try:
        async for _ in call:
            pass
    except WorkerFailed:
        return True
    return False
