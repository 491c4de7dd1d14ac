"""Python imports this first wherever its directory is on PYTHONPATH: faults, and played GPUs.

The repository's root must be on PYTHONPATH, too.
"""

import tests.chaos.injected.sitecustomize
import tests.end_to_end.played.sitecustomize  # noqa: F401  (plays the GPU)
