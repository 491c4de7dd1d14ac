"""How hard tests of properties try.

`FUZZ_EXAMPLES=20000` gives each property so many examples, drawn anew in every run; else it is a
fixed few.
"""

import os

from hypothesis import HealthCheck, settings

WANTED = os.environ.get("FUZZ_EXAMPLES")

settings.register_profile(
    "ours",
    max_examples=int(WANTED) if WANTED else 60,
    derandomize=WANTED is None,
    database=None,
    deadline=None,  # other programs have the core at times; `strict_read` counts our own time
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ours")
