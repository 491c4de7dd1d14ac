"""Played processes end with the module of their tests at the latest, and their memory with them."""

from collections.abc import Iterator

import pytest

from tests.gpu_workers.cuda_exchange.fake_cudart import LIVING


@pytest.fixture(autouse=True, scope="module")
def played_processes() -> Iterator[None]:
    yield
    while LIVING:
        LIVING[-1].end()
