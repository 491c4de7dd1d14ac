"""Python imports this first wherever its directory is on PYTHONPATH: workers then get played GPUs.

The repository's root must be on PYTHONPATH, too.
"""

import sys

if {"gpu_workers", "worker"} <= set(sys.orig_argv):
    from tests.end_to_end.played_gpu_worker import play

    play()
