"""The goodput of a candidate under a problem's workload, where the search is not asked for it."""

from planner.deployment import service
from planner.goodput import Goodput, goodput
from planner.placement.choices import Candidate, Problem
from planner.rate_search import Search
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.simulator.timeline import Timeline
from planner.verdict import Effort, Experiment
from planner.workload.requests import Requests

LOWEST_SHARE = 1e-3  # of the first guess
# Where the old placement stands now, in seconds: to a few percent, as its interval says.
EFFORT = Effort(start=2_000, cap=8_000, half_width=0.02)


def run(served: Service, requests: Requests) -> Timeline:
    """The simulator, at its defaults."""
    return simulate(served, requests)


def copy_goodput(problem: Problem, candidate: Candidate, guess: float) -> Goodput:
    """Of one copy; `guess` is the rate that is tried first."""
    served = service(problem.known, candidate.groups, problem.settings)
    experiment = Experiment(
        run=lambda requests: run(served, requests),
        draw=lambda num, rate, seed: problem.workload.requests(num, rate, seed),
        slo=problem.slo,
        seed=problem.seed,
        effort=EFFORT,
    )
    search = Search(guess=guess, lowest=guess * LOWEST_SHARE)
    return goodput(experiment, candidate.num_devices, search)
