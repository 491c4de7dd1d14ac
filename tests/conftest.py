"""How hard tests of properties try, and which tests may run beside each other.

`FUZZ_EXAMPLES=20000` gives each property so many examples, drawn anew in every run; else it is a
fixed few. Tests that start whole services take turns in one of the processes of `-n 2`, which the
others fill meanwhile, module by module.
"""

import os
from pathlib import Path

import pytest
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

SERVICES = ("chaos", "end_to_end", "systemd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        room = item.path.relative_to(here).parts[0]
        group = "services" if room in SERVICES else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
