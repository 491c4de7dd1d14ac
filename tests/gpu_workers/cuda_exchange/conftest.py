"""Played processes end with their test."""

from collections.abc import Iterator

import pytest

from tests.gpu_workers.cuda_exchange.fake_cudart import LIVING
from tests.gpu_workers.cuda_exchange.rigs import PROCESSES


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while PROCESSES:
        PROCESSES[-1].library.fails.clear()
        PROCESSES[-1].close()
    while LIVING:
        LIVING[-1].end()
