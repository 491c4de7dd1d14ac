from collections.abc import AsyncIterator

import httpx
import pytest

from daemon.frontend.served_model import ServedModel
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import LIMITS, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.frontend.planned_calls import served
from tests.daemon.small_tokenizers import byte_level_directory, load, sentence_piece_directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.fixture
async def service(tokenizer: Tokenizer) -> AsyncIterator[Service]:
    async with Service(tokenizer, reply=REPLY, limits=LIMITS).running() as service:
        yield service


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.fixture(scope="module")
def model_with_bos(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(sentence_piece_directory(tmp_path_factory.mktemp("pieces") / "model"))
