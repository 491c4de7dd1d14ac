"""Instances of several GPUs: each rank has its share of heads, layers and vocabulary, padded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_workers.collectives import Collectives
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.executor import Executor
from gpu_workers.models.config import read_config
from gpu_workers.step_plan import DrawnToken, StepPlan, StepResult
from ipc.sharding import Shard
from ipc.vocabulary import DType, Parallelism
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda.played_instance import PlayedRanks, played
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.driving import MAX_CONTEXT, Driver, greedy
from tests.gpu_workers.group_driver import Group, GroupDriver, shape_name, workers
from tests.gpu_workers.thread_collectives import of_instance

SHAPES = [Parallelism(2, 1), Parallelism(4, 1), Parallelism(1, 2), Parallelism(2, 2)]
PROMPTS = [list(b"Under the greenwood tree"), list(b"who loves"), list(b"to lie with me, and turn")]


@pytest.fixture(scope="module", params=["llama-gqa", "opt-pre-norm"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    return together(Driver(model_dir, dtype=DType.FP16))


def build(model_dir: Path, shard: Shard, collectives: Collectives) -> Executor:
    config, dtype = read_config(model_dir), DType.FP16
    device = FakeDevice()
    gpu = Gpu(device, FakeFlashInfer(device), StepLimits(MAX_CONTEXT, 4))
    layout = pool_layout(
        config,
        dtype=dtype,
        block_size=16,
        kv_bytes=1 << 24,
        shard=shard,
        head_dim=stored_head_dim(config.head_dim),
    )
    spec = EngineSpec(
        model_dir=str(model_dir), dtype=dtype, max_context_tokens=MAX_CONTEXT, shard=shard
    )
    return build_executor(config, spec, PrivatePool(layout), collectives=collectives, gpu=gpu)


@contextmanager
def driving(model_dir: Path, shape: Parallelism) -> Iterator[GroupDriver]:
    driver = GroupDriver(model_dir, dtype=DType.FP16)
    collectives = [rank for stage in of_instance(shape) for rank in stage]
    shards = workers(driver.config, shape)
    ranks = [build(model_dir, *pair) for pair in zip(shards, collectives, strict=True)]
    driver.group = Group(ranks, collectives)
    stands_in: Any = driver.group
    driver.executor = stands_in
    try:
        yield driver
    finally:
        driver.group.close()


def together(driver: Driver) -> list[list[int]]:
    """A prompt in chunks beside others, then decodes."""
    sequences = [driver.add(prompt, greedy()) for prompt in PROMPTS]
    drawn: dict[int, list[int]] = {sequence: [] for sequence in sequences}
    *early, late = sequences
    rows = [(s, len(p), True) for s, p in zip(early, PROMPTS, strict=False)]
    chunks = [(late, 9, False), (late, len(PROMPTS[-1]) - 9, True)]
    for turn in range(6):
        chunk = chunks[turn] if turn < len(chunks) else (late, 1, True)
        for sequence, row in driver.step(*rows, chunk).items():
            drawn[sequence] += row.token_ids
        rows = [(sequence, 1, True) for sequence in early]
    return list(drawn.values())


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_an_instance_of_any_shape_draws_what_one_cpu_draws(
    model_dir: Path, shape: Parallelism, expected: list[list[int]]
) -> None:
    with driving(model_dir, shape) as driver:
        assert together(driver) == expected
        assert {rank.max_in_flight for rank in driver.group.ranks} == {1}


class PlayedDriver(GroupDriver):
    """Plays the leader of GPUs that talk by NCCL."""

    def launch_all(self, ranks: PlayedRanks) -> None:
        group: Any = TellingGroup(ranks)
        self.group = self.executor = group


class TellingGroup:
    """Tells with each plan what was drawn since the last, as a scheduler does."""

    def __init__(self, ranks: PlayedRanks) -> None:
        self._ranks = ranks
        self._drawn: tuple[DrawnToken, ...] = ()

    def launch(self, plan: StepPlan) -> Any:
        plan, self._drawn = msgspec.structs.replace(plan, drawn=self._drawn), ()
        return self._ranks.launch(plan)

    def collect(self, launched: Any) -> StepResult:
        result = self._ranks.collect(launched)
        self._drawn += tuple(DrawnToken(r.sequence, r.token_ids[0]) for r in result.rows)
        return result


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_with_a_gpu_each_it_draws_the_same_and_its_decode_steps_are_graphs(
    model_dir: Path, shape: Parallelism, expected: list[list[int]]
) -> None:
    with played(model_dir, shape) as ranks:
        driver = PlayedDriver(model_dir, dtype=DType.FP16)
        driver.launch_all(ranks)
        assert together(driver) == expected
        ranks.settle()
        assert [rank.device.num_replays for rank in ranks.ranks] == [4] * shape.num_workers
        assert ranks.max_in_flight == (2 if shape.pp == 1 else 1)
