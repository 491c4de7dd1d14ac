"""Models for whole-service tests: the embedded default, and tiny ones made on the spot."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.reference import Reference
from tests.end_to_end.service import Service, serving, shapes
from tests.gpu_workers.checkpoints import llama_gqa

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    assert (SMOLLM2 / "config.json").exists(), "run `make test`, which fetches the model first"
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def tiny_service(tiny_llama: Path) -> Iterator[Service]:
    """One prefill and one decode instance of the tiny model, in fp32."""
    with serving(tiny_llama, "--dtype", "float32", "--kv-cache-gib", "0.02") as service:
        yield service


@pytest.fixture(scope="module")
def parallel_service(tiny_llama: Path) -> Iterator[Service]:
    """The same with two workers each: tensor parallel in prefill, a pipeline in decode."""
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.02")
    with serving(tiny_llama, *flags, *shapes(prefill=(2, 1), decode=(1, 2))) as service:
        yield service
