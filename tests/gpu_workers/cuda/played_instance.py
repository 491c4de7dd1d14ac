"""An instance of several GPUs that are played: one thread, one device and one engine each.

The real engine, graphs and `NcclCollectives`. `PlayedRanks` has an executor's face: plans go to all
ranks, encoded as on the wire, and each carries them out in its own time.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.executor import Executor, Launched
from gpu_workers.models.config import read_config
from gpu_workers.nccl_collectives import NcclCollectives
from gpu_workers.rendezvous import LOOPBACK, MeetingPoint, distributed
from gpu_workers.step_plan import StepPlan, StepResult
from ipc.sharding import Shard
from ipc.vocabulary import DType, Parallelism
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda.played_nccl import Call, PlayedGpu, groups_on
from tests.gpu_workers.driving import MAX_CONTEXT
from tests.gpu_workers.group_driver import workers

TIMEOUT_S = 30.0
KV_BYTES = 1 << 22


class PlayedRank:
    """One GPU, what it computes with, and the thread that asks it."""

    def __init__(
        self, model_dir: Path, shard: Shard, *, dtype: DType, block_size: int, max_batch: int
    ) -> None:
        self.device = PlayedGpu()
        self.shard = shard
        self.executor: Executor
        self.collectives: NcclCollectives
        self.thread = ThreadPoolExecutor(1)
        self._model_dir, self._dtype = model_dir, dtype
        self._block_size, self._max_batch = block_size, max_batch

    def build(self, store: Any) -> None:
        config, dtype = read_config(self._model_dir), self._dtype
        self.collectives = NcclCollectives(
            MeetingPoint(store, LOOPBACK),
            self.shard,
            hidden_size=config.hidden_size,
            dtype=TORCH_DTYPES[dtype],
            device=self.device.torch_device,
            timeout_s=TIMEOUT_S,
            make_group=groups_on(self.device),
        )
        spec = EngineSpec(
            model_dir=str(self._model_dir),
            dtype=dtype,
            max_context_tokens=MAX_CONTEXT,
            shard=self.shard,
            num_token_ids=config.vocab_size,
        )
        layout = pool_layout(
            config,
            dtype=dtype,
            block_size=self._block_size,
            kv_bytes=KV_BYTES,
            shard=self.shard,
            head_dim=stored_head_dim(config.head_dim),
        )
        limits = StepLimits(MAX_CONTEXT, self._max_batch)
        gpu = Gpu(self.device, FakeFlashInfer(self.device), limits)
        pool = PrivatePool(layout)
        self.executor = build_executor(config, spec, pool, collectives=self.collectives, gpu=gpu)


class PlayedRanks:
    """All ranks of an instance behind the face of one engine."""

    def __init__(self, ranks: Sequence[PlayedRank]) -> None:
        self.ranks = ranks

    @property
    def shape(self) -> Parallelism:
        return self.ranks[0].shard.parallelism

    @property
    def max_in_flight(self) -> int:
        """What all of them say."""
        (found,) = {rank.executor.max_in_flight for rank in self.ranks}
        return found

    @property
    def drawer(self) -> PlayedRank:
        (found,) = [rank for rank in self.ranks if rank.executor.is_drawer]
        return found

    @property
    def num_sequences(self) -> int:
        return sum(rank.executor.num_sequences for rank in self.ranks)

    def launch(self, plan: StepPlan) -> list[Future[Launched]]:
        wire = msgspec.json.encode(plan)
        return [
            rank.thread.submit(rank.executor.launch, msgspec.json.decode(wire, type=StepPlan))
            for rank in self.ranks
        ]

    def collect(self, launched: Sequence[Future[Launched]]) -> StepResult:
        pairs = zip(self.ranks, launched, strict=True)
        (own,) = [future for rank, future in pairs if rank is self.drawer]
        drawer = self.drawer
        return drawer.thread.submit(lambda: drawer.executor.collect(own.result())).result()

    def settle(self) -> None:
        """Wait until every rank has carried out what it was told."""
        for rank in self.ranks:
            rank.thread.submit(lambda: None).result()

    def check_tables(self) -> None:
        """When all that was drawn has been told, every rank knows the same of every sequence."""
        self.settle()
        tables = [
            {
                number: (sequence.tokens, sequence.num_unseen, sequence.computed)
                for number, sequence in rank.executor._table._sequences.items()
            }
            for rank in self.ranks
        ]
        assert all(table == tables[0] for table in tables)

    def calls(self, stage: int) -> list[list[Call]]:
        """What each rank of a stage asked its device for, once it was built."""
        self.settle()
        return [rank.device.calls for rank in self.ranks if rank.shard.stage == stage]


@contextmanager
def played(
    model_dir: Path,
    shape: Parallelism,
    *,
    dtype: DType = DType.FP16,
    block_size: int = 16,
    max_batch: int = 4,
) -> Iterator[PlayedRanks]:
    """An instance of that shape; at its end every rank leaves it."""
    store = distributed.HashStore()
    ranks = [
        PlayedRank(model_dir, shard, dtype=dtype, block_size=block_size, max_batch=max_batch)
        for shard in workers(read_config(model_dir), shape)
    ]
    for building in [rank.thread.submit(rank.build, store) for rank in ranks]:
        building.result()
    try:
        yield PlayedRanks(ranks)
    finally:
        for rank in ranks:
            rank.thread.shutdown()
            rank.collectives.close()
