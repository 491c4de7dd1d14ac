"""The table of all metrics in RUNBOOK.md: made from the registry, so that it is never behind.

`python -m tests.list_metrics` writes it; a test holds it against the registry.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric

from daemon.admin_views import NodeState
from daemon.live_metrics import LiveMetrics
from daemon.metrics import Metrics

RUNBOOK = Path(__file__).parents[1] / "RUNBOOK.md"
MARK = "<!-- made by `python -m tests.list_metrics` -->\n"
_HEAD = "\n| metric | kind | what it tells |\n|---|---|---|\n"


def families() -> list[Metric]:
    """Every family of the registry of a daemon, sorted by name."""
    metrics = Metrics("any")
    node: Any = SimpleNamespace(state=NodeState.READY, version="0")
    controller: Any = SimpleNamespace(num_open=0, count_phases=dict, instances=())
    supervisor: Any = SimpleNamespace(wards={})
    metrics.registry.register(LiveMetrics(node, controller, supervisor, metrics.model_labels))
    return sorted(metrics.registry.collect(), key=lambda family: exposed(family))


def exposed(family: Metric) -> str:
    """The name by which it is asked for; a histogram's has _bucket, _sum and _count after it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def sample_names(family: Metric) -> Iterator[str]:
    """The names of all of its samples."""
    if family.type == "histogram":
        yield from (f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
    else:
        yield exposed(family)


def table() -> str:
    rows = [f"| `{exposed(f)}` | {f.type} | {f.documentation} |" for f in families()]
    return _HEAD + "\n".join(rows) + "\n"


def main() -> int:
    head = RUNBOOK.read_text(encoding="utf-8").split(MARK)[0]
    RUNBOOK.write_text(head + MARK + table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
