"""One thread for whoever computes here, and in processes that are started: on a machine with others
at work, threads that wait for each other take many times as long."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before, num_threads = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    del os.environ["OMP_NUM_THREADS"]
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before
