"""Drive all ranks of an instance by the same hand-made plans: one thread and one engine each.

Plays the leader's part: what the drawer drew reaches the others with the next plan.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from gpu_workers.collectives import Collectives
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.executor import Executor, Launched
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.native_build import NativeLibrary
from gpu_workers.step_plan import DrawnToken, StepPlan, StepResult
from ipc.sharding import Shard
from ipc.vocabulary import DType, Parallelism
from tests.gpu_workers.driving import MAX_CONTEXT, Driver
from tests.gpu_workers.thread_collectives import of_instance

SHAPES = [Parallelism(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
DIVIDED = [shape for shape in SHAPES if shape.num_workers > 1]
NUM_TOKENS = 4096  # as the pool of a `Driver` holds


def workers(config: ModelConfig, parallelism: Parallelism) -> list[Shard]:
    """The shards of an instance, stage by stage."""
    return [
        config.shard(parallelism, stage, tp_rank)
        for stage in range(parallelism.pp)
        for tp_rank in range(parallelism.tp)
    ]


def shape_name(parallelism: Parallelism) -> str:
    """For the names of parametrised tests."""
    return f"tp{parallelism.tp}pp{parallelism.pp}"


def build_rank(
    model_dir: Path, shard: Shard, collectives: Collectives, dtype: DType = DType.FP32
) -> Executor:
    """The engine of one rank, with a pool of its own."""
    config = read_config(model_dir)
    kv_bytes = NUM_TOKENS * config.kv_bytes_per_token(dtype)  # of all layers: more than enough
    layout = pool_layout(config, dtype=dtype, block_size=16, kv_bytes=kv_bytes, shard=shard)
    spec = EngineSpec(
        model_dir=str(model_dir), dtype=dtype, max_context_tokens=MAX_CONTEXT, shard=shard
    )
    return build_executor(config, spec, PrivatePool(layout), collectives=collectives)


class Group:
    """The executors of an instance behind the face of one."""

    def __init__(self, ranks: Sequence[Executor], collectives: Sequence[Collectives]) -> None:
        self.ranks = ranks
        self._collectives = collectives
        self._threads = ThreadPoolExecutor(len(ranks))
        self._drawn: tuple[DrawnToken, ...] = ()

    def launch(self, plan: StepPlan) -> list[Launched]:
        plan = msgspec.structs.replace(plan, drawn=self._drawn)
        running = [
            self._threads.submit(self._launch, index, plan) for index in range(len(self.ranks))
        ]
        return [future.result() for future in running]

    def collect(self, launched: Sequence[Launched]) -> StepResult:
        pairs = zip(self.ranks, launched, strict=True)
        results = [(rank.is_drawer, rank.collect(step)) for rank, step in pairs]
        (drawn,) = [result for is_drawer, result in results if is_drawer]
        assert all(result.rows == () for is_drawer, result in results if not is_drawer)
        self._drawn = tuple(
            DrawnToken(row.sequence, row.token_ids[0])
            for row in drawn.rows
            if len(row.token_ids) == 1
        )
        return drawn

    def close(self) -> None:
        self._threads.shutdown()
        for collectives in self._collectives:
            collectives.close()

    def _launch(self, index: int, plan: StepPlan) -> Launched:
        try:
            return self.ranks[index].launch(plan)
        except BaseException:
            self._collectives[index].close()  # so that the others do not wait for us
            raise


class Gloo(NamedTuple):
    """Where ranks meet that talk by gloo, and what their stages share memory by, if they do."""

    url: str
    library: NativeLibrary | None = None


class GroupDriver(Driver):
    """A `Driver` whose steps are taken by all ranks of an instance."""

    group: Group


@contextmanager
def driving(
    model_dir: Path,
    parallelism: Parallelism,
    *,
    dtype: DType = DType.FP32,
    gloo: Gloo | None = None,
) -> Iterator[GroupDriver]:
    """An instance of that shape; its ranks are of one process unless they talk by gloo."""
    driver = GroupDriver(model_dir, dtype=dtype)
    shards = workers(driver.config, parallelism)
    collectives = _meet(driver.config, shards, dtype, gloo) if gloo else _threads(parallelism)
    ranks = [build_rank(model_dir, s, c, dtype) for s, c in zip(shards, collectives, strict=True)]
    driver.group = Group(ranks, collectives)
    stands_in: Any = driver.group
    driver.executor = stands_in
    try:
        yield driver
    finally:
        driver.group.close()


def _threads(parallelism: Parallelism) -> list[Collectives]:
    return [rank for stage in of_instance(parallelism) for rank in stage]


def _meet(
    config: ModelConfig, shards: Sequence[Shard], dtype: DType, gloo: Gloo
) -> list[Collectives]:
    def meet(shard: Shard) -> Collectives:
        torch_dtype: torch.dtype = TORCH_DTYPES[dtype]
        width = config.hidden_size
        return GlooCollectives(
            gloo.url,
            shard,
            hidden_size=width,
            dtype=torch_dtype,
            timeout_s=15.0,
            library=gloo.library,
        )

    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(meet, shards))
