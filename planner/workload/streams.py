"""Independent random streams of one seed.

Gaps and lengths come from streams of their own, each consumed strictly in order: the first n
values of a longer draw are those of a shorter one, and a change of one part leaves the other's
draws as they are (common random numbers).
"""

from enum import IntEnum

import numpy as np

from planner.errors import WorkloadError


class Stream(IntEnum):
    """What a stream is for; the value is the child's index below the seed, so never reuse one."""

    GAPS = 0
    ROWS = 1
    INPUT = 2
    OUTPUT = 3
    PHASE = 4


def generator(seed: int, stream: Stream) -> np.random.Generator:
    """The stream's generator, at its start."""
    if seed < 0:
        raise WorkloadError(f"the seed must be zero or above, not {seed}")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream),)))
