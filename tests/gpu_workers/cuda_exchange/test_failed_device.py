"""A device that fails ends the processes that use it, also those that have nothing to do."""

import pytest

from ipc.cuda_runtime import CudaError
from tests.gpu_workers.cuda_exchange.fake_cudart import ILLEGAL_ADDRESS
from tests.gpu_workers.cuda_exchange.rigs import WHOLE, Process


def test_who_has_nothing_to_pull_hears_of_a_failed_device_when_it_looks() -> None:
    """Every beat of the daemon's has a worker look."""
    idle = Process(WHOLE)
    assert idle.exchange.finished() == []
    idle.library.fails["cudaStreamSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        idle.exchange.finished()
