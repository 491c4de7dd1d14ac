"""`python -m tests.benchmarks.parallel_soak`: 500 requests one by one and 128 at once, of a tiny
model, through two prefill instances of tp 2 and a decode instance of pp 2, with verified pulls.

Every greedy answer must be the one that one worker of each phase gives alone, and all blocks must
be free at the end. Exit code 1 where that is not so.
"""

import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.end_to_end.bulk import (
    FLAGS,
    Ask,
    asks,
    at_once,
    one_by_one,
    two_prefills_one_decode,
)
from tests.end_to_end.service import Service, eventually, serving
from tests.gpu_workers.checkpoints import llama_gqa

NUM_SEQUENTIAL, NUM_CONCURRENT = 500, 128


def main() -> int:
    console = Console()
    asked = asks(NUM_SEQUENTIAL)
    with tempfile.TemporaryDirectory(prefix="ds-") as directory:
        model = llama_gqa(Path(directory) / "tiny-llama")
        with serving(model, *FLAGS) as service:
            solo = one_by_one(service, asked)
        with two_prefills_one_decode(model) as service:
            wrong = _wrong(service, asked, solo, console)
            eventually(lambda: service.is_all_free, 10, "all blocks free")
            counts = service.counts()["decode-0"]
    faults = counts["pull_faults"]
    console.print(f"{counts['num_pulls']:.0f} pulls, {faults:.0f} with faults; all blocks free")
    return int(bool(wrong or faults))


def _wrong(service: Service, asked: list[Ask], solo: list[object], console: Console) -> int:
    """Answers that differ, in both ways of asking."""
    wrong = 0
    for how, ask, number in (
        ("sequential", one_by_one, None),
        ("concurrent", at_once, NUM_CONCURRENT),
    ):
        began_s = time.monotonic()
        answers = ask(service, asked[:number])
        differ = sum(a != b for a, b in zip(answers, solo, strict=False))
        elapsed_s = time.monotonic() - began_s
        console.print(
            f"{len(answers)} {how} in {elapsed_s:.1f} s, {differ} unlike their solo answer"
        )
        wrong += differ
    return wrong


if __name__ == "__main__":
    sys.exit(main())
