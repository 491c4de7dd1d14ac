"""All ranks of an instance as threads of one process that talk as processes on one node would."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.native_build import NativeLibrary
from ipc.sharding import ModelSizes, Shard, shard
from ipc.vocabulary import Parallelism

SIZES = ModelSizes(
    name="tiny",
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    hidden_size=8,
    intermediate_size=8,
    vocab_size=8,
)
WIDTH = SIZES.hidden_size
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def shards(tp: int, pp: int) -> list[Shard]:
    pairs = [(stage, rank) for stage in range(pp) for rank in range(tp)]
    return [shard(SIZES, Parallelism(tp, pp), *pair) for pair in pairs]


def store_in(path: Path) -> str:
    return f"file://{path}/store"


@contextmanager
def met(
    url: str,
    tp: int,
    pp: int,
    *,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = 15.0,
    library: NativeLibrary | None = None,
) -> Iterator[Callable[..., list[Any]]]:
    """Runs a function of each rank's collectives on all of them; stages share memory by the
    library, and talk by gloo without it."""

    def join(own: Shard) -> GlooCollectives:
        return GlooCollectives(
            url, own, hidden_size=WIDTH, dtype=dtype, timeout_s=timeout_s, library=library
        )

    with ThreadPoolExecutor(tp * pp) as pool:
        ranks = list(pool.map(join, shards(tp, pp)))
        yield lambda act: list(pool.map(act, ranks))
    for rank in ranks:
        rank.close()
