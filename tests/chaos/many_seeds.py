"""The chaos of one thread on more seeds than the suite: `python -m tests.chaos.many_seeds`.

Each seed is a storm, a fault and a late one. Odd seeds are those whose instances have two steps of
a sequence under way; `--odd` runs these alone. Prints each run that went wrong, and how to repeat
it; the exit code is 1 where there was any.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from daemon.text import Tokenizer
from tests.chaos.faults import Fault
from tests.chaos.scenario import TOPOLOGIES, one_fault, one_late_fault, storm, undisturbed
from tests.gpu_workers.checkpoints import write_tokenizer

LATE = (Fault.DEATH, Fault.DROPPED_UP, Fault.DROPPED_DOWN)


def runs(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Of a seed, each with a name."""
    dice = random.Random(seed)
    victim, fault, late = dice.choice(list(TOPOLOGIES)), dice.choice(list(Fault)), dice.choice(LATE)
    yield f"storm, seed {seed}", partial(storm, tokenizer, seed)
    yield f"{fault} to {victim}, seed {seed}", partial(one_fault, tokenizer, fault, victim, seed)
    told = f"late {late} to {victim}, seed {seed}"
    yield told, partial(one_late_fault, tokenizer, late, victim, seed % 1000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--odd", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()
    began_s, num_runs, wrong = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        (Path(directory) / "config.json").write_text("{}")
        tokenizer = Tokenizer.from_directory(Path(directory))
        for number in range(asked.first, asked.first + asked.count):
            seed = 2 * number + 1 if asked.odd else number
            if time.monotonic() > began_s + asked.seconds:
                break
            for told, run in runs(tokenizer, seed):
                num_runs += 1
                try:
                    run()
                except Exception:
                    wrong += 1
                    sys.stdout.write(f"{told}\n{traceback.format_exc()}\n")
            undisturbed.cache_clear()
            if not number % 50:
                sys.stdout.write(f"seed {seed}: {num_runs} runs, {wrong} wrong\n")
                sys.stdout.flush()
    sys.stdout.write(f"{num_runs} runs up to seed {seed}, {wrong} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
