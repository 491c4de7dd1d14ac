"""Python imports this first wherever its directory is on PYTHONPATH: workers then get played GPUs
that do not reach each other, so that pulls go through the host's memory.

The repository's root must be on PYTHONPATH, too.
"""

import sys

if {"gpu_workers", "worker"} <= set(sys.orig_argv):
    from tests.end_to_end.played_gpu_worker import REACH, play

    REACH.clear()
    play()
