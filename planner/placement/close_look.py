"""Goodputs at full effort, each once, with what it takes to ask for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.placement.choices import Candidate, Evaluated, Problem
from planner.placement.crew import Crew
from planner.placement.hunt import Hunt
from planner.placement.known_shapes import KnownShapes
from planner.placement.laboratory import Compare
from planner.placement.limits import Limits
from planner.placement.options import Depth
from planner.workload.requests import Requests


@dataclass
class Bench:
    """The tools of one search, and what they have found at full effort."""

    problem: Problem
    crew: Crew
    limits: Limits
    hunt: Hunt
    found: dict[Candidate, Evaluated] = field(default_factory=dict)

    @property
    def sample(self) -> Requests:
        return self.crew.laboratory.sample

    @property
    def shapes(self) -> KnownShapes:
        return self.crew.laboratory.shapes

    def look(
        self, candidates: Sequence[Candidate], near: Mapping[Candidate, float], what: str
    ) -> list[Evaluated]:
        """In their order. `near`: rates that earlier looks found."""
        fresh = [each for each in dict.fromkeys(candidates) if each not in self.found]
        tasks = [self.hunt.task(each, Depth.FINAL, near.get(each)) for each in fresh]
        for candidate, goodput in zip(fresh, self.crew.goodputs(tasks, what), strict=True):
            self.found[candidate] = Evaluated(candidate, goodput)
        return [self.found[each] for each in candidates]

    def comparison(self, first: Candidate, second: Candidate, rate_per_device: float) -> Compare:
        """Both at the same rate for each of their devices."""
        least = max(
            self.limits.settling(each.groups, rate_per_device * each.num_devices)
            for each in (first, second)
        )
        setups = self.hunt.setup(first), self.hunt.setup(second)
        return Compare(*setups, rate_per_device, least)
