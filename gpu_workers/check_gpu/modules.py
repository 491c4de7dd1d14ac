"""Stage: FlashInfer's modules, each compiled unless it was ahead, and loaded.

Where nothing was compiled ahead that takes half a minute or so for each of attention's. The ones
that serve most models come first, and each one's seconds are noted as it is there: what is left
when the stage's time is over, attention's stage leaves out.
"""

import time

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import Note, Skipped, require

AT_ONCE_S = 5.0  # what took less was there already, or is a trifle


def build_modules(backend: Backend, note: Note) -> str:
    """All of them, each one's seconds."""
    wanted = backend.modules()
    if not wanted:
        raise Skipped("there are no modules to compile on a CPU")
    seconds, missing = [], []
    for module in wanted:
        began_s = time.monotonic()
        try:
            state = module.load()
        except Exception as error:  # the others may well be there
            state = f"{type(error).__name__}: {str(error)[:200]}"
            missing.append(module.name)
        seconds.append(time.monotonic() - began_s)
        note(module.name, {"seconds": round(seconds[-1], 2), "state": state})
    require(not missing, f"these cannot be had: {', '.join(missing)}")
    slow = sum(one > AT_ONCE_S for one in seconds)
    return f"{len(wanted)} modules are there after {sum(seconds):.1f} s, {slow} took over 5 s"
