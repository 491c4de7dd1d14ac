"""Pulls between played GPUs: what arrives, when it is reported, and what is given back."""

import itertools
import logging

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
    filled,
    part,
    ranks,
    reference,
)

SHAPES = list(itertools.product((1, 2, 4), (1, 2)))
NEIGHBOURS = {(0, 1), (1, 0)}


def exporters(tp: int, pp: int, gpu: int = 0) -> list[Process]:
    return [filled(Process(rank, gpu=gpu), reference()) for rank in ranks(tp, pp)]


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
    there.exchange.close()
    there.exchange.free()
    assert there.library.freed_while_open == 0


def test_a_worker_that_leaves_does_not_free_what_others_have_open() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    there.exchange.close()
    assert there.library.num_allocated == 1
    here.pull((1,), (0,))
    assert here.until_finished() == [7]


def test_memory_that_is_freed_before_its_importers_have_closed_it_is_noticed() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.meet([there])
    there.exchange.close()
    there.exchange.free()
    assert there.library.freed_while_open == 1


def test_incarnations_are_kept_apart_B2() -> None:
    here, (there,), (reborn,) = Process(WHOLE), exporters(1, 1), exporters(1, 1)
    reborn.exchange.pool.fill_(2.0)
    here.meet([there])
    descriptor = reborn.exchange.descriptor
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
    here.exchange.close()


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


def test_a_pool_that_cannot_be_opened_names_the_call_and_its_error_C15() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.library.fails["cudaIpcOpenMemHandle"] = 217
    expected = "cannot be opened.*cudaIpcOpenMemHandle: cudaErrorPeerAccessUnsupported"
    with pytest.raises(PoolUnavailable, match=expected):
        here.meet([there])


def test_memory_that_cannot_be_shared_is_an_error_of_the_start_C13_C15() -> None:
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


@pytest.mark.parametrize(
    ("gpu", "reach", "path"),
    [(0, set(), "local"), (1, NEIGHBOURS, "peer"), (1, set(), "host")],
    ids=["same", "reached", "apart"],
)
def test_the_best_way_is_chosen_once_told_and_right_C14(
    gpu: int, reach: set[tuple[int, int]], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    here, there = Process(WHOLE, gpu=gpu, reach=reach), exporters(2, 2)
    assert here.exchange.pull_path == ""
    here.meet(there)
    assert here.exchange.pull_path == path
    assert f"is read by way of: {path}" in caplog.text
    here.pull((6, 1), (0, 3))
    here.until_finished()
    assert torch.equal(here.exchange.pool[[0, 3]], reference()[[6, 1]])
    here.exchange.unmap_instance("there", EPOCH)
    here.exchange.close()
    here.exchange.free()
    assert here.library.num_allocated == 0


def test_peer_access_that_does_not_open_is_told_and_replaced_by_the_host_C14(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=set()), exporters(1, 1)
    here.library._cudaDeviceCanAccessPeer = lambda into, *_: setattr(into.contents, "value", 1)  # type: ignore[method-assign]
    here.meet([there])
    assert here.exchange.pull_path == "host"
    assert "peer access from GPU 1 to 0 fails" in caplog.text


def test_a_way_far_below_its_kind_is_warned_of_C13(caplog: pytest.LogCaptureFixture) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
    here.library.slow_factor = 600
    here.meet([there])
    assert "(peer) are slow: 0.67 GB/s, at least 10 were expected" in caplog.text


def test_a_way_of_its_usual_speed_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
    here.meet([there])
    assert "slow" not in caplog.text


def test_an_older_runtime_copies_one_by_one() -> None:
    here, (there,) = Process(WHOLE, version=12080), exporters(1, 1)
    here.meet([there])
    here.pull((1, 3), (0, 2))
    here.until_finished()
    assert torch.equal(here.exchange.pool[[0, 2]], reference()[[1, 3]])
    assert "cudaMemcpyBatchAsync" not in here.library.calls


def test_a_gpu_that_our_process_does_not_see_is_left_to_the_driver() -> None:
    here = Process(WHOLE, gpu=0, sees=("GPU-b",))
    (there,) = exporters(1, 1)
    here.meet([there])
    assert here.exchange.pull_path == "peer"
