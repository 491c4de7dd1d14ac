"""Stage: captured steps draw what eager ones draw, one and two steps under way.

Batches that fill a captured size, and such that are padded to one. Where a token differs it must
be a near-tie, see `scoring`.
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
        eager = Driver(backend.eager(captured))
        in_flight = captured.max_in_flight
        equal = total = 0
        for batch in batches:
            asked = prompts(batch, 70)
            expected = eager.greedy(asked, num_tokens)
            for depth in sorted({1, in_flight}):
                drawn = Driver(captured, in_flight=depth).greedy(asked, num_tokens)
                who = f"batch {batch}, {depth} under way"
                same = require_likely(eager, asked, drawn, expected, who)
                note(who, f"{same} of {batch} equal")
                equal, total = equal + same, total + batch
    what = "captured and eager" if backend.is_gpu else "no graphs on a CPU: two eager"
    return f"{what} steps draw the same: {equal} of {total} equal, the others near-ties"
