"""The four ranks of a tp 2, pp 2 instance, a process each, driven by plans known beforehand.

`python -m tests.gpu_workers.rank_process MODEL_DIR RENDEZVOUS TOKENS`: TOKENS is what the instance
is expected to draw, in JSON, one list for each of PROMPTS; ranks that do not draw are told them, as
by a leader. Prints what each rank drew. The processes are forked, so that torch is loaded once.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.models.config import read_config
from gpu_workers.shm_collectives import sums_library
from gpu_workers.step_plan import DrawnToken, NewBlocks, NewSequence, Row, StepPlan
from ipc.vocabulary import Parallelism
from tests.gpu_workers.driving import greedy
from tests.gpu_workers.group_driver import build_rank, workers

PROMPTS = [list(b"one prompt of several"), list(b"another")]
NUM_BLOCKS_EACH = 4
TIMEOUT_S = 60.0
FORK = get_context("fork")
ALL_DONE = FORK.Barrier(4)
CHUNK = 5


def plans(tokens: Sequence[Sequence[int]]) -> Iterator[StepPlan]:
    """One prompt after the other: prefill in two chunks, then decode."""
    for index, (prompt, drawn) in enumerate(zip(PROMPTS, tokens, strict=True)):
        blocks = tuple(range(index * NUM_BLOCKS_EACH, (index + 1) * NUM_BLOCKS_EACH))
        yield StepPlan(
            step_id=0,
            removed=(index - 1,) if index else (),
            added=(NewSequence(index, (0,), tuple(prompt), (), 0, greedy()),),
            blocks=(NewBlocks(index, blocks),),
            rows=(Row(index, CHUNK, False),),
        )
        yield StepPlan(step_id=1, rows=(Row(index, len(prompt) - CHUNK, True),))
        for token in drawn[:-1]:
            yield StepPlan(
                step_id=2, drawn=(DrawnToken(index, token),), rows=(Row(index, 1, True),)
            )


def run_rank(model_dir: str, rendezvous: str, tokens: str, rank: int) -> list[list[int]]:
    """What that rank drew for each prompt."""
    torch.set_num_threads(1)
    config = read_config(model_dir)
    shard = workers(config, Parallelism(2, 2))[rank]
    collectives = GlooCollectives(
        rendezvous,
        shard,
        hidden_size=config.hidden_size,
        dtype=torch.float32,
        library=sums_library(),
    )
    executor = build_rank(Path(model_dir), shard, collectives)
    drawn: dict[int, list[int]] = {}
    for plan in plans(json.loads(tokens)):
        for row in executor.collect(executor.launch(plan)).rows:
            drawn.setdefault(row.sequence, []).extend(row.token_ids)
    ALL_DONE.wait(TIMEOUT_S)  # what was sent to the next stage is lost with its sender
    collectives.close()
    return [drawn[sequence] for sequence in sorted(drawn)]


def main(arguments: Sequence[str]) -> None:
    with ProcessPoolExecutor(4, mp_context=FORK) as pool:
        drawn = list(pool.map(partial(run_rank, *arguments), range(4)))
    sys.stdout.write(json.dumps(drawn))


if __name__ == "__main__":
    main(sys.argv[1:])
