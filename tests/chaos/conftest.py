"""A tokenizer with a letter for each token, so that stop strings are met and cut."""

import pytest

from daemon.text import Tokenizer
from tests.gpu_workers.checkpoints import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    return Tokenizer.from_directory(directory)
