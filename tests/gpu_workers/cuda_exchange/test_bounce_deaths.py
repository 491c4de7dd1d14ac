"""Pulls through the host's memory whose owner or reader dies, or stands still, in the middle."""

import signal
from collections.abc import Iterator

import pytest
import torch

from gpu_workers.cuda_proof import SPARE_BYTES
from gpu_workers.cuda_slots import SLOT_BYTES
from ipc.kv_cuda import rounded
from ipc.vocabulary import WorkerName
from tests.gpu_workers.cuda_exchange.other_process import OtherProcess, dies_reading, owner
from tests.gpu_workers.cuda_exchange.rigs import (
    EPOCH,
    LARGE,
    WHOLE,
    Process,
    far,
    filled,
    reference,
)

SLOTS_FULL = -(-rounded(LARGE.pool_bytes + SPARE_BYTES) // SLOT_BYTES)
"""That a whole pool is."""


@pytest.fixture
def dying() -> Iterator[OtherProcess]:
    """An owner that dies when the first pull has it fill its third slot, and two are on their way:
    the way is measured twice before."""
    with OtherProcess(owner, LARGE, dies_at=2 * SLOTS_FULL + 3) as other:
        yield other


def test_an_owner_that_dies_in_the_middle_loses_the_pull_which_is_told_A1_A4_A22(
    dying: OtherProcess,
) -> None:
    here = far(LARGE)
    here.exchange.map_peer(WorkerName("there"), EPOCH, LARGE, dying.descriptor())
    blocks = range(LARGE.num_blocks)
    here.pull(blocks, blocks)
    results = here.until_results()
    assert [(r.request_id, r.is_lost, r.num_bytes) for r in results] == [(7, True, 0)]
    assert dying.ended() == -signal.SIGKILL
    here.exchange.unmap_instance("there", EPOCH)
    assert here.exchange.finished() == []


def test_the_next_incarnation_of_an_owner_that_died_is_pulled_from_B1_B2(
    dying: OtherProcess,
) -> None:
    here, (reborn,) = far(LARGE), [Process(LARGE)]
    reborn.exchange.pool.fill_(2.0)
    here.exchange.map_peer(WorkerName("there"), EPOCH - 1, LARGE, dying.descriptor())
    here.pull(range(LARGE.num_blocks), range(LARGE.num_blocks), epoch=EPOCH - 1)
    assert here.until_finished() == [7]
    here.exchange.unmap_instance("there", EPOCH - 1)
    here.meet([reborn])
    here.pull((5,), (2,))
    assert here.until_finished() == [7]
    assert (here.exchange.pool[2] == 2.0).all()


def test_an_owner_that_stands_still_holds_up_pulls_from_it_alone_until_it_is_killed_B19() -> None:
    here, (near,) = far(), [filled(Process(WHOLE, gpu=1), reference())]
    with OtherProcess(owner, WHOLE) as stopped:
        here.exchange.map_peer(WorkerName("there"), EPOCH, WHOLE, stopped.descriptor())
        here.meet([near], instance="near")
        stopped.stop()
        here.pull((1,), (0,), request_id=1)
        here.pull((2,), (3,), request_id=2, owner="near")
        assert here.until_finished() == [2]
        assert torch.equal(here.exchange.pool[3], reference()[2])
        stopped.kill()
        (result,) = here.until_results()
        assert (result.request_id, result.is_lost) == (1, True)


def test_parting_from_an_owner_that_stands_still_does_not_wait_for_it_A12_A22() -> None:
    here = far()
    with OtherProcess(owner, WHOLE) as stopped:
        here.exchange.map_peer(WorkerName("there"), EPOCH, WHOLE, stopped.descriptor())
        stopped.stop()
        here.pull((1,), (0,), request_id=1)
        here.pull((2,), (1,), request_id=2)
        here.exchange.unmap_instance("there", EPOCH)
        assert [(r.request_id, r.is_lost) for r in here.exchange.finished()] == [
            (1, True),
            (2, True),
        ]


def test_a_peer_that_has_died_before_it_is_met_ends_nobody_B3() -> None:
    here = far()
    with OtherProcess(owner, WHOLE) as gone:
        descriptor = gone.descriptor()
        gone.kill()
        assert gone.ended() == -signal.SIGKILL
        here.exchange.map_peer(WorkerName("there"), EPOCH, WHOLE, descriptor)
    assert here.exchange.knows("there", EPOCH)
    here.pull((1,), (0,))
    (result,) = here.until_results()
    assert result.is_lost


def test_a_reader_that_dies_in_the_middle_takes_nothing_from_the_others_A14() -> None:
    there = Process(LARGE)
    there.exchange.pool.fill_(3.0)
    before = there.library.num_allocated
    with OtherProcess(dies_reading, LARGE) as reader:
        reader.give(there.exchange.descriptor)
        assert reader.ended() == -signal.SIGKILL
    here = far(LARGE)
    here.meet([there])
    here.pull((5,), (2,))
    here.until_finished()
    assert (here.exchange.pool[2] == 3.0).all()
    assert there.library.num_allocated == before + 1  # the slots that it shares with us
