"""How a search goes about it: effort, processes, and what is looked at beside the placements."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ipc.vocabulary import Parallelism
from planner.errors import TargetError
from planner.latency.choose import Knowledge, latency_model
from planner.latency.interface import LatencyModel
from planner.verdict import Effort

Choose = Callable[[Knowledge, Parallelism], LatencyModel]


class Depth(StrEnum):
    """A first look drops the clearly worse; only contenders are looked at closely."""

    FIRST = "first"
    FINAL = "final"


@dataclass(frozen=True)
class Options:
    """What the answer does not depend on, or hardly.

    Args:
        first, final: requests of a run, at a first look and for the contenders.
        num_processes: None takes all cores. The answer does not depend on it.
        prunes: false simulates every feasible candidate, bounds or no bounds.
        allows_roofline: shapes that the profile does not know are taken from a roofline of the
            cluster's device; otherwise they are dropped.
        chunk_tokens: token budgets that chunked baselines are searched over.
        fixed: shapes of prefill and decode, where only their counts are searched.
        choose: the latency model of a shape; a module's own function, so that processes know it.
    """

    first: Effort = field(default_factory=lambda: Effort(1_000, 1_000))
    final: Effort = field(default_factory=lambda: Effort(2_000, 4_000))
    num_processes: int | None = None
    prunes: bool = True
    allows_roofline: bool = False
    with_baselines: bool = True
    with_sensitivity: bool = True
    chunk_tokens: tuple[int, ...] = (256, 512, 1024, 2048)
    fixed: tuple[Parallelism, Parallelism] | None = None
    choose: Choose = latency_model

    def __post_init__(self) -> None:
        if self.num_processes is not None and self.num_processes < 1:
            raise TargetError(f"a search needs at least one process, not {self.num_processes}")

    def effort(self, depth: Depth) -> Effort:
        return self.first if depth is Depth.FIRST else self.final

    def tolerance(self, depth: Depth) -> float:
        """Relative width of the bracket of a rate."""
        return 0.12 if depth is Depth.FIRST else 0.06
