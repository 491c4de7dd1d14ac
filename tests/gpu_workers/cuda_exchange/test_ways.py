"""Which way leads to a pool, what is found out about it, and what is told."""

import logging
import re
from typing import Any

import pytest
import torch

from gpu_workers.cuda_pairing import Pairing
from gpu_workers.cuda_probe import RUN_BYTES, crossing
from gpu_workers.cuda_routes import Gpu, Here
from gpu_workers.gpu_links import Links
from ipc.vocabulary import WorkerName
from tests.gpu_workers.cuda_exchange.fake_function import OUT_OF_MEMORY
from tests.gpu_workers.cuda_exchange.fake_nvml import FakeNvml
from tests.gpu_workers.cuda_exchange.rigs import (
    EPOCH,
    NEIGHBOURS,
    UUIDS,
    WHOLE,
    Process,
    exporters,
    reference,
)


def near() -> Process:
    """On a GPU that reaches its neighbour."""
    return Process(WHOLE, gpu=1, reach=NEIGHBOURS)


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
    here.pull((6, 1), (0, 3))
    here.until_finished()
    assert torch.equal(here.exchange.pool[[0, 3]], reference()[[6, 1]])
    assert caplog.text.count(f"is read by way of: {path}") == 4
    here.exchange.unmap_instance("there", EPOCH)
    here.close()
    here.exchange.free()
    assert here.library.num_allocated == 0


def test_peer_access_that_does_not_open_is_told_and_replaced_by_the_host_C14_C15(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=set()), exporters(1, 1)
    here.library._cudaDeviceCanAccessPeer = lambda into, *_: setattr(into.contents, "value", 1)  # type: ignore[method-assign]
    here.meet([there])
    assert here.exchange.pull_path == "host"
    expected = "through the host's memory: .* cudaIpcOpenMemHandle: cudaErrorPeerAccessUnsupported"
    assert re.search(expected, caplog.text)


def test_peer_access_that_brings_nothing_is_found_out_and_replaced_by_the_host_A7_C14(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No call fails where an IOMMU stands between two GPUs."""
    here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
    here.library.garbles = True
    here.meet([there])
    assert "host's memory: copies from GPU GPU-a bring other bytes than are there" in caplog.text
    here.pull((6,), (0,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[0], reference()[6])
    assert here.library.calls.count("cudaIpcCloseMemHandle") == 1


def test_a_full_gpu_finds_out_ways_that_bring_nothing_too_A7_C14(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the right bytes lie about from another peer."""
    here, (one,), (other,) = near(), exporters(1, 1), exporters(1, 1)
    here.library.fails["cudaMalloc"] = OUT_OF_MEMORY
    here.meet([one], instance="one")
    assert here.exchange.pull_path == "peer"
    here.library.garbles = True
    here.meet([other])
    assert "host's memory: copies from GPU GPU-a bring other bytes than are there" in caplog.text
    here.pull((6,), (0,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[0], reference()[6])


def test_a_way_on_which_copies_fail_is_replaced_by_the_host_C14(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, (there,) = near(), exporters(1, 1)
    open_handle = here.library._cudaIpcOpenMemHandle

    def open_and_bar(*arguments: Any) -> None:
        open_handle(*arguments)
        here.library.reach = set()

    here.library._cudaIpcOpenMemHandle = open_and_bar  # type: ignore[method-assign]
    here.meet([there])
    assert "host's memory: copies from GPU GPU-a fail: cudaMemcpyAsync: " in caplog.text
    here.pull((6,), (0,))
    here.until_finished()
    assert torch.equal(here.exchange.pool[0], reference()[6])


def test_gpus_without_peer_access_are_named(caplog: pytest.LogCaptureFixture) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=set()), exporters(1, 1)
    here.meet([there])
    assert "through the host's memory: GPU 1 has no peer access to GPU 0" in caplog.text
    assert "cudaIpcOpenMemHandle" not in here.library.calls


def test_a_gpu_that_our_process_does_not_see_is_left_to_the_driver() -> None:
    here = Process(WHOLE, gpu=0, sees=("GPU-b",))
    (there,) = exporters(1, 1)
    here.meet([there])
    assert here.exchange.pull_path == "peer"


def test_a_way_far_below_its_kind_is_warned_of_C13(caplog: pytest.LogCaptureFixture) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
    here.library.slow_factor = 600
    here.meet([there])
    assert "(peer) are slow: 0.67 GB/s, at least 10 were expected" in caplog.text


def test_a_way_of_its_usual_speed_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
    here.meet([there])
    assert "slow" not in caplog.text


def test_a_full_gpu_meets_its_peers_without_measuring(caplog: pytest.LogCaptureFixture) -> None:
    """It bears no scratch memory; a self-test ends no worker."""
    caplog.set_level(logging.INFO)
    here, (there,) = Process(WHOLE), exporters(1, 1)
    here.library.fails["cudaMalloc"] = OUT_OF_MEMORY
    here.meet([there])
    assert "is read by way of: local (cudaMalloc: cudaErrorMemoryAllocation" in caplog.text
    here.pull((1, 3), (0, 2))
    here.until_finished()
    assert torch.equal(here.exchange.pool[[0, 2]], reference()[[1, 3]])


def test_measuring_writes_to_no_pool_and_leaves_nothing_behind() -> None:
    here, (there,) = Process(WHOLE), exporters(1, 1)
    before = here.library.num_allocated
    here.meet([there])
    assert not here.exchange.pool.any()
    assert torch.equal(there.exchange.pool, reference())
    assert here.library.num_allocated == before + 1  # the peer's pool


def threshold_kib(caplog: pytest.LogCaptureFixture, process: Process) -> list[int]:
    """What a process finds for each of four pools."""
    caplog.clear()
    process.meet(exporters(2, 2))
    return [int(kib) for kib in re.findall(r"copies below (\d+) KiB together", caplog.text)]


def test_which_copies_go_together_is_measured_for_each_kind_of_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A call takes as long as 16 KB do on the slowed link between GPUs, and 80 KB within one."""
    caplog.set_level(logging.INFO)
    near, same = Process(WHOLE, gpu=1, reach=NEIGHBOURS), Process(WHOLE, gpu=0)
    near.library.slow_factor = same.library.slow_factor = 50
    assert threshold_kib(caplog, near) == [16] * 4
    assert threshold_kib(caplog, same) == [64] * 4


def test_it_is_measured_once_for_a_kind_of_way() -> None:
    here = Process(WHOLE)
    here.meet(exporters(1, 1))
    num_batches = here.library.calls.count("cudaMemcpyBatchAsync")
    here.meet(exporters(1, 1), instance="another")
    assert num_batches == here.library.calls.count("cudaMemcpyBatchAsync") > 0


def test_pulls_copy_as_was_measured() -> None:
    """Blocks of 2 KiB, scattered: together where a call costs more, and one by one where less."""
    for factor, num_batches in ((1, 1), (1000, 0)):
        here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
        here.library.slow_factor = factor
        here.meet([there])
        here.library.calls.clear()
        here.pull((6, 1, 3), (0, 2, 4))
        here.until_finished()
        assert here.library.calls.count("cudaMemcpyBatchAsync") == num_batches
        assert torch.equal(here.exchange.pool[[0, 2, 4]], reference()[[6, 1, 3]])


def test_an_older_runtime_copies_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    here, (there,) = Process(WHOLE, version=12080), exporters(1, 1)
    here.meet([there])
    here.pull((1, 3), (0, 2))
    here.until_finished()
    assert torch.equal(here.exchange.pool[[0, 2]], reference()[[1, 3]])
    assert "cudaMemcpyBatchAsync" not in here.library.calls
    assert "copies below 0 KiB together" in caplog.text


@pytest.mark.parametrize(
    ("single_s", "expected"), [(0.0, 0), (2e-6, 1 << 16), (1.0, 2 * RUN_BYTES[-1])]
)
def test_the_threshold_is_where_a_call_costs_what_the_bytes_do(
    single_s: float, expected: int
) -> None:
    link = 50e9
    found = crossing(
        list(RUN_BYTES),
        single_s=lambda size: max(single_s, size / link),
        together_s=lambda size: 0.5e-6 + size / link,
    )
    assert found == expected


def test_a_pool_too_small_to_measure_with_has_no_threshold() -> None:
    assert crossing([], single_s=float, together_s=float) == 0


def paired(nvml: FakeNvml, caplog: pytest.LogCaptureFixture, slow_factor: float) -> str:
    """What is told of a peer whose way has 400 GB/s, or less."""
    here, (there,) = Process(WHOLE, gpu=1, reach=NEIGHBOURS), exporters(1, 1)
    here.library.slow_factor = slow_factor
    stream = here.memory.runtime.make_stream()
    ours = Here(here.memory, Gpu(1, UUIDS), here.exchange._own, stream)
    pairing = Pairing(ours, find_links=lambda: Links(nvml))
    caplog.clear()
    handle = there.exchange._own.handle
    pairing.open(WorkerName("there"), handle, there.exchange.descriptor).close()
    return caplog.text


@pytest.mark.parametrize(
    ("nvml", "least"),
    [
        (FakeNvml(UUIDS, nvlinks=18), "239"),
        (FakeNvml(UUIDS, pcie=(4, 16)), "16"),
        (FakeNvml(UUIDS, pcie=(9, 8)), "30"),  # a generation that is not known yet
        (FakeNvml(UUIDS, nvlinks=0), "10"),  # it says nothing of its links
        (FakeNvml(("GPU-c",)), "10"),
        (None, "10"),
    ],
    ids=["nvlink", "pcie", "newer", "silent", "unknown", "none"],
)
def test_a_way_is_judged_by_its_link_where_that_is_known_C13_C14(
    nvml: FakeNvml, least: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert f"at least {least} were expected" in paired(nvml, caplog, slow_factor=100)
    assert "slow" not in paired(nvml, caplog, slow_factor=1)
