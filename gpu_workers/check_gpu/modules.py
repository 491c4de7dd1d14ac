"""Stage: FlashInfer's modules, each compiled unless it was ahead, and loaded.

Where nothing was compiled ahead that takes half a minute or so for each of attention's. The ones
that serve most models come first; after a while nothing more is compiled, since other stages want
their time, too.
"""

import time
from collections.abc import Sequence

from gpu_workers.check_gpu.backend import Backend, Module
from gpu_workers.check_gpu.outcome import Note, Skipped, require

COMPILING_S = 90.0  # after so many nothing more is compiled
AT_ONCE_S = 5.0  # what took less was there already, or is a trifle


def build_modules(backend: Backend, note: Note) -> str:
    """All of them, each one's seconds."""
    wanted = backend.modules()
    if not wanted:
        raise Skipped("there are no modules to compile on a CPU")
    seconds: list[float] = []
    missing: list[str] = []
    for module in wanted:
        if sum(seconds) > COMPILING_S and not module.is_compiled():
            note(module.name, "left out: it is not compiled, and the time for that was over")
            continue
        began_s = time.monotonic()
        is_there, state = _load(module)
        seconds.append(time.monotonic() - began_s)
        note(module.name, {"seconds": round(seconds[-1], 2), "state": state})
        if not is_there:
            missing.append(module.name)
    require(not missing, f"these cannot be had: {', '.join(missing)}")
    return _told(seconds, num_left_out=len(wanted) - len(seconds))


def _load(module: Module) -> tuple[bool, str]:
    """Whether it is there now, and how that came."""
    state = "compiled ahead" if module.is_compiled() else "compiled now"
    try:
        module.load()
    except Exception as error:  # the others may well be there
        return False, f"{type(error).__name__}: {str(error)[:200]}"
    return True, state


def _told(seconds: Sequence[float], *, num_left_out: int) -> str:
    slow = sum(one > AT_ONCE_S for one in seconds)
    left_out = f", {num_left_out} left out" if num_left_out else ""
    return f"{len(seconds)} modules after {sum(seconds):.1f} s, {slow} took over 5 s{left_out}"
