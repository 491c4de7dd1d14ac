"""One rank of a tp 2, pp 2 instance as a process of its own, driven by plans known beforehand.

`python -m tests.gpu_workers.rank_process MODEL_DIR RENDEZVOUS RANK TOKENS`: TOKENS is what the
instance is expected to draw, in JSON, one list for each of PROMPTS; ranks that do not draw are told
them, as a leader would. Prints what this rank drew.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.models.config import read_config
from gpu_workers.step_plan import DrawnToken, NewBlocks, NewSequence, Row, StepPlan
from ipc.vocabulary import Parallelism
from tests.gpu_workers.driving import greedy
from tests.gpu_workers.group_driver import build_rank, workers

PROMPTS = [list(b"one prompt of several"), list(b"another")]
NUM_BLOCKS_EACH = 4
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


def main(model_dir: Path, rendezvous: str, rank: int, tokens: Sequence[Sequence[int]]) -> None:
    torch.set_num_threads(1)
    config = read_config(model_dir)
    shard = workers(config, Parallelism(2, 2))[rank]
    collectives = GlooCollectives(
        rendezvous, shard, hidden_size=config.hidden_size, dtype=torch.float32, timeout_s=60.0
    )
    executor = build_rank(model_dir, shard, collectives)
    drawn: dict[int, list[int]] = {}
    for plan in plans(tokens):
        for row in executor.collect(executor.launch(plan)).rows:
            drawn.setdefault(row.sequence, []).extend(row.token_ids)
    collectives.close()
    sys.stdout.write(json.dumps([drawn[sequence] for sequence in sorted(drawn)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
