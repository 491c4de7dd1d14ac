"""A candidate under a problem's workload, where the search is not asked for it."""

from dataclasses import dataclass, field

from planner.goodput import Goodput, goodput
from planner.placement.choices import Candidate, Problem
from planner.placement.known_shapes import KnownShapes
from planner.placement.options import Options
from planner.rate_search import LOWEST_SHARE, Search
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.simulator.timeline import Timeline
from planner.verdict import Effort, Experiment
from planner.workload.requests import Requests

# Where the old placement stands now, in seconds: to a few percent, as its interval says.
EFFORT = Effort(start=2_000, cap=8_000, half_width=0.02)


def run(served: Service, requests: Requests) -> Timeline:
    """The simulator, at its defaults."""
    return simulate(served, requests)


@dataclass(frozen=True)
class Copies:
    """Copies of candidates; `options` are the search's, so that it is as fast here as there."""

    options: Options = field(default_factory=Options)

    def service(self, problem: Problem, candidate: Candidate) -> Service:
        """One copy."""
        return KnownShapes(problem, self.options).unit(candidate)

    def goodput(self, problem: Problem, candidate: Candidate, guess: float) -> Goodput:
        """Of one copy; `guess` is the rate that is tried first."""
        served = self.service(problem, candidate)
        experiment = Experiment(
            run=lambda requests: run(served, requests),
            draw=problem.workload.requests,
            slo=problem.slo,
            seed=problem.seed,
            effort=EFFORT,
        )
        search = Search(guess=guess, lowest=guess * LOWEST_SHARE)
        return goodput(experiment, candidate.num_devices, search)
