"""A device that fails ends the processes that use it, also those that have nothing to do."""

import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from gpu_workers.worker import EXIT_DEVICE, Worker
from ipc import channel
from ipc.cuda_runtime import CudaError
from tests.gpu_workers.cuda_exchange.fake_function import ILLEGAL_ADDRESS
from tests.gpu_workers.cuda_exchange.rigs import WHOLE, Process
from tests.gpu_workers.cuda_exchange.test_shared_gpus import config


def test_who_has_nothing_to_pull_hears_of_a_failed_device_when_it_looks() -> None:
    """Every beat of the daemon's has a worker look."""
    idle = Process(WHOLE)
    assert idle.exchange.finished() == []
    idle.library.fails["cudaStreamSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        idle.exchange.finished()


@pytest.fixture
def as_before() -> Iterator[None]:
    """A worker sets its process up for itself."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    gc.enable()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    "failure",
    [
        CudaError(
            "cudaEventQuery", ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal access"
        ),
        torch.AcceleratorError("CUDA error: an illegal access\nCUDA kernel errors might be"),
        torch.OutOfMemoryError("CUDA out of memory. Tried an illegal access\nSee documentation"),
    ],
)
def test_a_worker_whose_device_fails_ends_with_a_code_of_its_own_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    class Failing(Worker):
        def _serve(self) -> None:
            raise failure

    ours, theirs = channel.make_pair()
    asked = msgspec.structs.replace(config(tmp_path, shares=False), endpoint=f"ipc://{tmp_path}/w")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as daemon, ours, theirs:
        daemon.bind(asked.endpoint)
        assert Failing(asked, theirs).run() == EXIT_DEVICE
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert told.startswith("decode-0/0.0 ends: its device failed: ")
    assert told.endswith("an illegal access")
