"""A stage on which workers are played."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.asyncio

from daemon.config import DaemonConfig
from daemon.neighbours import Neighbours
from daemon.text import Tokenizer
from tests.daemon.small_tokenizers import byte_level_directory, byte_level_json, load
from tests.daemon.stage import MakeStage, OverheardLink, Stage


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("tokenizer") / "model"))


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[MakeStage]:
    (tmp_path / "tokenizer.json").write_text(byte_level_json())
    (tmp_path / "config.json").write_text("{}")
    context = zmq.asyncio.Context()
    links = []

    async def make(*, neighbours: Neighbours | None = None, **counts: int) -> Stage:
        links.append(OverheardLink(context, f"ipc://{tmp_path}/link"))
        config = DaemonConfig(**{"prefill": 0, "decode": 0, **(counts or {"mixed": 1})})
        tokenizer = Tokenizer.from_directory(tmp_path)
        return Stage(links[-1], tokenizer, config, neighbours=neighbours)

    yield make
    for link in links:
        link.close()
    context.term()
