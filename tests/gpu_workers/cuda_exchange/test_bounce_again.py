"""Owners that live and cannot serve a reader through the host's memory, now: its pulls are lost and
told with the reason, and the next one knocks again."""

import os
from contextlib import suppress

import pytest

from gpu_workers.cuda_bounce import BounceRoute
from ipc import kv_bounce
from ipc.kv_bounce import Line, Unanswered
from ipc.vocabulary import WorkerName
from tests.gpu_workers.cuda_exchange.other_process import OtherProcess, cramped, owner
from tests.gpu_workers.cuda_exchange.rigs import EPOCH, WHOLE, Process, far

THERE = WorkerName("there")


def until_pulled(here: Process) -> None:
    """Ask again and again."""
    while True:
        here.pull((5,), (2,))
        (result,) = here.until_results()
        if not result.is_lost:
            return


def crowd(descriptor: int) -> list[Line]:
    """As many strangers as there is room for before a door."""
    memory, lines = os.memfd_create("no-slots"), list[Line]()
    with suppress(Unanswered):
        while True:
            lines.append(kv_bounce.knock(descriptor, memory))
    os.close(memory)
    return lines


def test_a_door_that_nobody_opens_loses_a_pull_and_is_tried_again_A22_B19() -> None:
    """It once ended the reader, as one that can never start."""
    here = far()
    with OtherProcess(owner, WHOLE) as busy:
        descriptor = busy.descriptor()
        busy.stop()
        strangers = crowd(descriptor)
        here.exchange.map_peer(THERE, EPOCH, WHOLE, descriptor)
        here.pull((5,), (2,))
        (result,) = here.until_results()
        assert result.loss.startswith("the pool's owner cannot be asked: Resource temporarily")
        busy.go_on()
        until_pulled(here)
        assert (here.exchange.pool[2] == 1.0).all()
    for stranger in strangers:
        stranger.close()


def test_an_owner_without_room_for_a_readers_slots_tells_it_and_serves_it_later_A22() -> None:
    """It once lost all pulls of that reader until one of the two was started anew."""
    here = far()
    with OtherProcess(cramped, WHOLE) as full:
        here.exchange.map_peer(THERE, EPOCH, WHOLE, full.descriptor())
        here.pull((5,), (2,))
        (result,) = here.until_results()
        assert result.loss == (
            "the pool's owner serves us no more: the pool cannot be mapped: Cannot allocate memory"
        )
        full.give_room()
        here.pull((5,), (2,))
        (result,) = here.until_results()
        assert not result.is_lost
        assert (here.exchange.pool[2] == 1.0).all()


def test_a_pull_after_an_owners_end_is_lost_with_the_reason() -> None:
    here, there = far(), Process(WHOLE)
    here.meet([there])
    here.pull((5,), (2,))
    assert not here.until_results()[0].is_lost
    there.exchange._porter.close()
    for _ in range(2):
        here.pull((5,), (2,))
        (result,) = here.until_results()
        assert result.loss == "the pool's owner has ended"


def test_a_pull_that_is_taken_up_while_we_part_does_not_knock_again() -> None:
    """Or it would wait for an owner that stands still, and our parting for it."""
    here, there = far(), Process(WHOLE)
    here.meet([there])
    (route,) = (peer.route for peer in here.exchange._peers)
    assert isinstance(route, BounceRoute)
    here.pull((5,), (2,))
    here.until_finished()
    route._owner.leave()
    for _ in range(2):  # the first finds the line cut, the second none
        here.pull((5,), (2,))
        (result,) = here.until_results()
        assert result.is_lost


@pytest.mark.parametrize("num_pulls", [1, 3])
def test_what_waits_when_we_part_is_lost_because_of_that(num_pulls: int) -> None:
    here = far()
    with OtherProcess(owner, WHOLE) as stopped:
        here.exchange.map_peer(THERE, EPOCH, WHOLE, stopped.descriptor())
        stopped.stop()
        for number in range(num_pulls):
            here.pull((1,), (number,), request_id=number)
        here.exchange.unmap_instance("there", EPOCH)
        results = here.exchange.finished()
    assert [result.request_id for result in results] == list(range(num_pulls))
    assert all(result.is_lost for result in results)
