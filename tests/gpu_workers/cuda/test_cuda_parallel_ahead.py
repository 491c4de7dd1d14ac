"""Crowds before an instance of several GPUs: what each gets is what one CPU draws for it alone, and
the ranks of a stage never ask their devices for different sums.

In fp32, which the fake kernels take here and real ones do not: no token is a matter of rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from ipc.vocabulary import DType, Parallelism
from tests.gpu_workers.cuda import fake_flashinfer, flashinfer_checks
from tests.gpu_workers.cuda.parallel_rig import MAX_BATCH, ParallelRig, run_crowd
from tests.gpu_workers.cuda.played_instance import PlayedRanks, played
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.driving import Driver
from tests.gpu_workers.group_driver import shape_name
from tests.gpu_workers.rig import BLOCK_SIZE

SHAPES = [Parallelism(2, 1), Parallelism(1, 2), Parallelism(2, 2)]
NUM_REQUESTS = 10


@pytest.fixture(scope="module", autouse=True)
def kernels_in_fp32() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (fake_flashinfer, flashinfer_checks):
            patch.setattr(module, "require_16_bit_type", lambda dtype: None)
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(model_dir: Path) -> Driver:
    return Driver(model_dir, block_size=BLOCK_SIZE)


@contextmanager
def instance(model_dir: Path, shape: Parallelism) -> Iterator[PlayedRanks]:
    how = {"dtype": DType.FP32, "block_size": BLOCK_SIZE, "max_batch": MAX_BATCH}
    with played(model_dir, shape, **how) as ranks:  # type: ignore[arg-type]
        yield ranks


@pytest.fixture(scope="module", params=SHAPES, ids=shape_name)
def ranks(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[PlayedRanks]:
    with instance(model_dir, request.param) as ranks:
        yield ranks


def check_agreement(ranks: PlayedRanks) -> None:
    """All ranks of a stage have asked for the same; what one stage sent, the next one took."""
    stages = [ranks.calls(stage) for stage in range(ranks.shape.pp)]
    for calls in stages:
        assert all(own == calls[0] for own in calls)
    for before, after in pairwise(stages):
        sent = [call.shape for call in before[0] if call.kind == "send"]
        assert sent == [call.shape for call in after[0] if call.kind == "recv"]


@pytest.mark.parametrize(
    ("num_blocks", "chunk_tokens", "seed"), [(200, None, 1), (200, 9, 2), (14, None, 3), (14, 9, 4)]
)
def test_each_of_a_crowd_gets_what_one_cpu_draws_for_it_alone(
    ranks: PlayedRanks, cpu: Driver, num_blocks: int, chunk_tokens: int | None, seed: int
) -> None:
    rig = ParallelRig(ranks, num_blocks=num_blocks, chunk_tokens=chunk_tokens, seed=seed)
    run_crowd(rig, NUM_REQUESTS)
    check_agreement(ranks)
    for choice in rig.choices.values():
        expected = choice.expected(cpu)
        assert choice.drawn == expected[: len(choice.drawn)]
        assert choice.is_aborted or choice.drawn == expected
    assert rig.is_all_free
    assert ranks.num_sequences == 0
    assert rig.num_deepest == 2
    assert (rig.scheduler.decodes.num_preempted > 0) == (num_blocks < 100)
