"""Stage: captured steps draw what eager ones draw, one and two steps under way.

Batches that fill a captured size, and such that are padded to one; eager steps with two under way,
too, whose plans take turns. Where a token differs it must be a near-tie, see `scoring`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import Note
from gpu_workers.check_gpu.scoring import require_likely
from gpu_workers.check_gpu.tiny_models import TINY, prompts, write_config

KV_BYTES = 64 << 20
BATCHES = {True: (1, 3, 8, 13, 32, 61), False: (1, 3, 8)}


def check_graphs(
    backend: Backend, note: Note, batches: Sequence[int] = (), num_tokens: int = 24
) -> str:
    """Greedy tokens of each batch, eager and captured, step by step and two under way."""
    batches = batches or BATCHES[backend.is_gpu]
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), TINY)
        spec = spec_of(directory, backend.dtype, max_context=256, is_dummy=True)
        captured = backend.executor(spec, KV_BYTES, max_batch=max(batches))
        eager = backend.eager(captured)
        judge = Driver(eager)
        ways = {("captured" if backend.is_gpu else "again", 1): captured}
        if captured.max_in_flight > 1:
            ways |= {("captured", 2): captured, ("eager", 2): eager}
        equal = total = 0
        for batch in batches:
            asked = prompts(batch, 70)
            expected = judge.greedy(asked, num_tokens)
            for (kind, depth), executor in ways.items():
                drawn = Driver(executor, in_flight=depth).greedy(asked, num_tokens)
                who = f"batch {batch}, {kind}, {depth} under way"
                same = require_likely(judge, asked, drawn, expected, who)
                note(who, f"{same} of {batch} equal")
                equal, total = equal + same, total + batch
    what = "captured and eager" if backend.is_gpu else "no graphs on a CPU: two eager"
    return f"{what} steps draw the same: {equal} of {total} equal, the others near-ties"
