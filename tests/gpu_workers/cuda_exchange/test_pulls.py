"""Pulls between played GPUs: what arrives, when it is reported, and what is given back."""

import itertools
import os

import msgspec
import pytest
import torch

from ipc.cuda_runtime import CudaError
from ipc.kv_layout import LayoutMismatch
from ipc.kv_shm import PoolUnavailable
from ipc.vocabulary import WorkerName
from tests.gpu_workers.cuda_exchange.rigs import (
    EPOCH,
    WHOLE,
    Process,
    exporters,
    part,
    ranks,
    reference,
)

SHAPES = list(itertools.product((1, 2, 4), (1, 2)))


@pytest.mark.parametrize("source", SHAPES, ids=str)
@pytest.mark.parametrize("target", SHAPES, ids=str)
@pytest.mark.parametrize("batch_below", [0, 1 << 20], ids=["single", "batched"])
def test_pulled_blocks_equal_the_reference_for_all_pairs_of_shapes_A7(
    source: tuple[int, int], target: tuple[int, int], batch_below: int
) -> None:
    there = exporters(*source)
    for rank in ranks(*target):
        here = Process(rank, batch_below=batch_below)
        here.meet(there)
        assert here.exchange.knows("there", EPOCH)
        here.pull((6, 1, 2, 3), (0, 3, 4, 5))
        assert here.until_finished() == [7]
        expected = part(reference(), rank)
        assert torch.equal(here.exchange.pool[[0, 3, 4, 5]], expected[[6, 1, 2, 3]])
        assert not here.exchange.pool[[1, 2, 6, 7]].any()


def test_a_pull_is_reported_only_when_its_last_copy_is_done() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.pull((1, 3, 5), (0, 2, 4))
    assert here.exchange.finished() == []
    assert not torch.equal(here.exchange.pool[[0, 2, 4]], reference()[[1, 3, 5]])
    assert here.until_finished() == [7]
    assert torch.equal(here.exchange.pool[[0, 2, 4]], reference()[[1, 3, 5]])


def source_is_used_again_once_released(*, skips_fences: bool) -> bool:
    """Whether the pulled blocks are right when their source is overwritten on `finished`."""
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.library.skips_fences = skips_fences
    here.pull((1, 3, 5), (0, 2, 4))
    here.until_finished()
    there.exchange.pool.fill_(1.0)  # the next prompt
    here.exchange.unmap_instance("there", EPOCH)  # the device gets on with its copies
    return torch.equal(here.exchange.pool[[0, 2, 4]], reference()[[1, 3, 5]])


def test_a_source_that_is_released_when_its_pull_is_reported_may_be_used_again() -> None:
    assert source_is_used_again_once_released(skips_fences=False)


def test_without_the_fence_it_would_be_used_again_too_early() -> None:
    assert not source_is_used_again_once_released(skips_fences=True)


def test_what_is_computed_after_a_pull_waits_for_it() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.library.calls.clear()
    here.pull((1,), (0,))
    here.until_finished()
    assert here.library.calls[-2:] == ["cudaStreamWaitEvent", "cudaEventDestroy"]


def test_several_pulls_end_in_the_order_of_their_beginning() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.pull((1,), (0,), request_id=1)
    here.pull((2,), (1,), request_id=2)
    assert here.until_finished() + here.until_finished() == [1, 2]


def test_parting_ends_the_copies_under_way_and_then_closes() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.pull((1, 3), (0, 2))
    here.exchange.unmap_instance("there", EPOCH)
    assert not here.exchange.knows("there", EPOCH)
    assert here.library.calls[-1] == "cudaSetDevice"  # back from where the pool was closed
    assert "cudaIpcCloseMemHandle" in here.library.calls
    assert [result.request_id for result in here.exchange.finished()] == [7]
    assert torch.equal(here.exchange.pool[[0, 2]], reference()[[1, 3]])
    here.exchange.unmap_instance("there", EPOCH)  # again: nothing happens
    there.close()
    there.exchange.free()
    assert there.library.freed_while_open == 0


def test_a_worker_that_leaves_does_not_free_what_others_have_open() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    there.close()
    assert there.library.num_allocated == 1
    here.pull((1,), (0,))
    assert here.until_finished() == [7]


def test_memory_that_is_freed_before_its_importers_have_closed_it_is_noticed() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    there.close()
    there.exchange.free()
    assert there.library.freed_while_open == 1


def test_incarnations_are_kept_apart_B2() -> None:
    here, (there,), (reborn,) = Process(WHOLE), exporters(1, 1), exporters(1, 1)
    reborn.exchange.pool.fill_(2.0)
    here.meet([there])
    descriptor = os.dup(reborn.exchange.descriptor)
    here.exchange.map_peer(WorkerName("there"), EPOCH + 1, WHOLE, descriptor)
    here.exchange.unmap_instance("there", EPOCH + 1)
    here.pull((1,), (0,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[0], reference()[1])


def test_workers_of_one_process_share_memory_without_opening_it_C17() -> None:
    here = Process(WHOLE)
    here.exchange.pool.copy_(reference())
    before = here.library.calls.count("cudaIpcOpenMemHandle")
    here.meet([here])
    here.pull((6,), (0,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[0], reference()[6])
    here.exchange.unmap_instance("there", EPOCH)
    assert here.library.calls.count("cudaIpcOpenMemHandle") == before
    here.close()


def test_a_pool_that_is_opened_twice_is_closed_with_the_last_C17() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.meet([there], instance="again")
    here.exchange.unmap_instance("again", EPOCH)
    here.pull((1,), (0,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[0], reference()[1])
    assert "cudaIpcCloseMemHandle" not in here.library.calls
    here.exchange.unmap_instance("there", EPOCH)
    assert here.library.calls.count("cudaIpcCloseMemHandle") == 1
    assert here.library.calls.count("cudaIpcOpenMemHandle") == 1


def test_an_instance_is_known_when_all_of_its_ranks_are_mapped() -> None:
    here, there = Process(WHOLE), exporters(2, 1)
    here.meet(there[:1])
    assert not here.exchange.knows("there", EPOCH)
    here.meet(there)
    assert here.exchange.knows("there", EPOCH)


def test_pools_of_other_blocks_are_refused() -> None:
    here = Process(WHOLE)
    other = Process(WHOLE)
    other.exchange.layout = msgspec.structs.replace(WHOLE, block_size=8)
    with pytest.raises(LayoutMismatch, match="block_size differs: 8 at the source, 4 here"):
        here.meet([other])


def test_weights_that_cannot_be_shared_are_an_error_of_the_start_C13_C15() -> None:
    process = Process(WHOLE)
    process.library.fails["cudaIpcGetMemHandle"] = 1
    before = process.library.num_allocated
    with pytest.raises(PoolUnavailable, match="does not share memory: cudaIpcGetMemHandle"):
        process.memory.allocate(1 << 20, "GPU-a")
    assert process.library.num_allocated == before


def test_a_device_without_room_for_the_pool_says_how_much_was_asked() -> None:
    process = Process(WHOLE)
    process.library.fails["cudaMalloc"] = 2
    with pytest.raises(PoolUnavailable, match=r"a KV pool of 3\.00 GiB cannot be had on GPU 0"):
        process.memory.allocate((3 << 30) - 5, "GPU-a")


def test_a_failed_copy_is_an_error_and_not_a_result() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.pull((1,), (0,))
    here.library.fails["cudaEventQuery"] = 700
    with pytest.raises(CudaError, match="cudaEventQuery: cudaErrorIllegalAddress"):
        here.exchange.finished()


def test_pulls_are_compared_with_their_source_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    here.library.skips_fences = True
    here.pull((1, 3), (0, 2))
    (result,) = here.exchange.finished()
    assert result.num_different == 2
