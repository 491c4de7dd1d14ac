"""A rank of a stage that dies: `python -m tests.gpu_workers.lost_rank RENDEZVOUS`.

It is tp rank 1 of 2, takes part in one sum of three ones, and kills itself before the next.
"""

import os
import signal
import sys

import torch

from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.shm_collectives import sums_library
from tests.gpu_workers.joined_ranks import WIDTH, shards


def main(rendezvous: str) -> None:
    rank = GlooCollectives(
        rendezvous,
        shards(2, 1)[1],
        hidden_size=WIDTH,
        dtype=torch.float32,
        library=sums_library(),
    )
    rank.all_reduce(torch.ones(3))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
