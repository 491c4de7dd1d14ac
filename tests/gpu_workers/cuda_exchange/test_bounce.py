"""Pulls through the host's memory: what arrives, who serves whom, and who is sent away."""

import os
import socket

import pytest
import torch

from gpu_workers.cuda_slots import NUM_SLOTS, SLOT_BYTES, create
from ipc import kv_bounce
from ipc.cuda_runtime import CudaError
from ipc.kv_bounce import Unanswered
from ipc.kv_shm import PoolUnavailable
from ipc.vocabulary import WorkerName
from tests.gpu_workers.cuda_exchange.fake_function import (
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PEER_UNSUPPORTED,
)
from tests.gpu_workers.cuda_exchange.rigs import (
    EPOCH,
    LARGE,
    WHOLE,
    Process,
    exporters,
    far,
    filled,
    part,
    ranks,
    reference,
)

SHAPES = [(1, 1), (2, 1), (1, 2), (4, 2)]


@pytest.mark.parametrize("source", SHAPES, ids=str)
@pytest.mark.parametrize("target", SHAPES, ids=str)
def test_pulled_blocks_equal_the_reference_for_all_pairs_of_shapes_A7(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    there = exporters(*source)
    for rank in ranks(*target):
        here = far(rank)
        here.meet(there)
        assert here.exchange.pull_path == "host"
        here.pull((6, 1, 2, 3), (0, 3, 4, 5))
        assert here.until_finished() == [7]
        expected = part(reference(), rank)
        assert torch.equal(here.exchange.pool[[0, 3, 4, 5]], expected[[6, 1, 2, 3]])
        assert not here.exchange.pool[[1, 2, 6, 7]].any()


def test_more_than_all_slots_hold_goes_through_them_in_turn() -> None:
    assert LARGE.pool_bytes > NUM_SLOTS * SLOT_BYTES
    here, there = far(LARGE), Process(LARGE)
    there.exchange.pool.copy_(torch.randn(LARGE.shape))
    here.meet([there])
    blocks = list(range(LARGE.num_blocks))
    here.pull(blocks, blocks[::-1])
    here.until_finished()
    assert torch.equal(here.exchange.pool, there.exchange.pool.flip(0))


def test_several_readers_have_slots_of_their_own() -> None:
    (there,), readers = exporters(1, 1), [far() for _ in range(3)]
    for reader in readers:
        reader.meet([there])
    for number, reader in enumerate(readers):
        reader.pull((number + 1,), (0,), request_id=number)
    for number, reader in enumerate(readers):
        assert reader.until_finished() == [number]
        assert torch.equal(reader.exchange.pool[0], reference()[number + 1])


def test_a_gpu_that_does_not_share_memory_is_read_through_the_host_C14() -> None:
    """Its own process starts all the same."""
    there = filled(Process(WHOLE, refuses="cudaIpcGetMemHandle"), reference())
    here = Process(WHOLE)
    here.meet([there])
    assert here.exchange.pull_path == "host"
    here.pull((5,), (2,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[2], reference()[5])


def test_a_sandbox_that_passes_no_handles_on_takes_the_host_on_one_gpu_too_C14() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.library.fails["cudaIpcOpenMemHandle"] = PEER_UNSUPPORTED
    here.meet([there])
    assert here.exchange.pull_path == "host"
    here.pull((5,), (2,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[2], reference()[5])


def test_the_host_can_be_asked_for_where_a_direct_way_misbehaves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISTSERVE_PULL_PATH", "host")
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    assert here.exchange.pull_path == "host"
    assert "through the host's memory: DISTSERVE_PULL_PATH asks for it" in caplog.text
    monkeypatch.setenv("DISTSERVE_PULL_PATH", "nvlink")
    with pytest.raises(PoolUnavailable, match="'nvlink'; it may be host, or be left out"):
        Process(WHOLE)


def test_memory_that_cannot_be_pinned_serves_too_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, (there,) = far(), exporters(1, 1)
    here.library.refuses_pinning = there.library.refuses_pinning = True
    here.meet([there])
    here.pull((5, 2), (2, 0))
    here.until_finished()
    assert torch.equal(here.exchange.pool[[2, 0]], reference()[[5, 2]])
    assert "it is not pinned: cudaHostRegister: cudaErrorNotSupported" in caplog.text
    here.exchange.unmap_instance("there", EPOCH)
    assert "cudaHostUnregister" not in here.library.calls
    assert "cudaMemcpyBatchAsync" not in here.library.calls  # it is not for such memory


def test_no_memory_for_the_slots_is_told_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    here, (there,) = far(), exporters(1, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PoolUnavailable, match=r"0\.02 GiB cannot be had: No space left"):
        here.meet([there])


def test_parting_gives_back_all_that_a_way_through_the_host_took() -> None:
    here, (there,) = far(), exporters(1, 1)
    before = here.library.num_allocated
    here.meet([there])
    here.exchange.unmap_instance("there", EPOCH)
    assert here.library.num_allocated == before
    here.meet([there])  # and again
    here.pull((5,), (2,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[2], reference()[5])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"nonsense",
        bytes(8),
        kv_bounce.pack_asking(NUM_SLOTS, [(0, 1)]),
        kv_bounce.pack_asking(0, [(1 << 40, 1)]),
        kv_bounce.pack_asking(0, [(0, SLOT_BYTES), (0, 1)]),
        kv_bounce.pack_asking(0, [((1 << 64) - 1, (1 << 64) - 1)]),
    ],
)
def test_who_asks_for_what_is_not_there_is_sent_away_and_nobody_else(message: bytes) -> None:
    there = Process(LARGE)
    here = far(LARGE)
    here.meet([there])
    memory = create("stranger")
    line = kv_bounce.knock(there.exchange.descriptor, memory)
    with line._socket as raw:
        raw.send(message)
        if not message:
            raw.shutdown(socket.SHUT_WR)
        with pytest.raises(Unanswered, match="serves us no more: " if message else "has ended"):
            line.await_filled()
    os.close(memory)
    here.pull((5,), (2,))
    assert here.until_finished() == [7]


def test_a_reader_whose_slots_are_of_another_size_is_sent_away() -> None:
    there = Process(WHOLE)
    memory = os.memfd_create("small")
    line = kv_bounce.knock(there.exchange.descriptor, memory)
    with pytest.raises(Unanswered, match="no more: the pool has 0 bytes where"):
        line.await_filled()
    line.close()
    os.close(memory)


def test_an_owner_whose_device_fails_is_as_good_as_dead_for_its_readers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, (there,) = far(), exporters(1, 1)
    here.meet([there])
    here.pull((5,), (2,))
    here.until_finished()
    there.library.fails["cudaStreamSynchronize"] = NOT_SUPPORTED
    here.pull((5,), (2,))
    (result,) = here.until_results()
    assert result.is_lost
    assert "blocks cannot be read through the host any more" in caplog.text


def test_an_owner_that_can_serve_no_reader_any_more_ends_and_does_not_go_on_without() -> None:
    """Else its prompts would be computed again and again, and never be read."""
    here, (there,) = far(), exporters(1, 1)
    here.meet([there])
    here.pull((5,), (2,))
    here.until_finished()
    assert there.exchange.finished() == []
    there.library.fails["cudaMemcpyAsync"] = NOT_SUPPORTED
    here.pull((5,), (2,))
    (result,) = here.until_results()
    assert result.is_lost
    with pytest.raises(CudaError, match="cudaMemcpyAsync: cudaErrorNotSupported"):
        there.exchange.finished()


def test_a_way_that_cannot_be_measured_says_why_and_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    here, (there,) = far(), exporters(1, 1)
    here.library.fails["cudaMalloc"] = OUT_OF_MEMORY
    here.meet([there])
    here.pull((5,), (2,))
    assert here.until_finished() == [7]
    assert torch.equal(here.exchange.pool[2], reference()[5])
    assert "are not measured: cudaMalloc: cudaErrorMemoryAllocation" in caplog.text


def test_what_is_no_door_is_no_pool_of_a_gpu() -> None:
    here, memory = far(), os.memfd_create("cpu-pool")
    with pytest.raises(PoolUnavailable, match="not the handle of a pool in a GPU's memory"):
        here.exchange.map_peer(WorkerName("there"), EPOCH, WHOLE, memory)
