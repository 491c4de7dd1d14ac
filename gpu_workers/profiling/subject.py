"""What is profiled: an instance of a model, as the daemon would run it. Types alone."""

import msgspec

from gpu_workers.group import ranks
from ipc.messages import LoadFormat
from ipc.vocabulary import DType, Parallelism, WorkerName

INSTANCE = "profiled"
LEADER = WorkerName(INSTANCE)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks build their engine from the same one; `num_threads` are each worker's.

    `kv_bytes` is the size of each worker's pool; where `gpu_memory_utilization` is given, the
    share of its GPU's memory that a worker may take in all decides instead. Rank i computes on GPU
    `first_gpu + i`, or on CPU where that is None; what it pulls comes from GPU
    `pull_from + i`. `max_batch` bounds decode batches, for graphs.
    """

    model_dir: str
    dtype: DType
    load_format: LoadFormat
    max_context_tokens: int
    block_size: int
    kv_bytes: int
    num_threads: int
    parallelism: Parallelism
    first_gpu: int | None = None
    pull_from: int | None = None
    gpu_memory_utilization: float | None = None
    max_batch: int = 1

    @property
    def names(self) -> list[WorkerName]:
        """All ranks, the leader first."""
        return ranks(INSTANCE, self.parallelism)
