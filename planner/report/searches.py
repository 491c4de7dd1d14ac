"""Placement searches as the report makes them: on A100s, degrees within a node up to 8, as in the
authors' scripts."""

from dataclasses import replace

from planner.cluster import Cluster
from planner.deployment import Settings
from planner.goodput import Goodput, goodput
from planner.latency.choose import Knowledge
from planner.latency.published import DEVICE
from planner.paper_curves import COEFFICIENTS, MAX_BATCH, VLLM_PREFILL_TOKENS, paper_load
from planner.placement.choices import Affinity, Candidate, Problem
from planner.placement.crew import Crew
from planner.placement.known_shapes import KnownShapes
from planner.placement.results import Found
from planner.placement.search import search
from planner.rate_search import Search
from planner.report.engines import ROOFLINE_MODEL
from planner.report.terms import Terms
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.verdict import Experiment

PAPER_CLUSTER = Cluster(4, 8, DEVICE)
MAX_DEGREE = 8


def problem(model: str, workload: str, slo: Slo, cluster: Cluster = PAPER_CLUSTER) -> Problem:
    """For the best unit, by DistServe's raw kernels or by a roofline."""
    profile = None if model == ROOFLINE_MODEL else COEFFICIENTS["distserve"]
    return Problem(
        known=Knowledge(model, device=None if profile else DEVICE, profile=profile),
        cluster=cluster,
        workload=paper_load(workload),
        slo=slo,
        affinity=Affinity.LOW,
        settings=Settings(max_batch=MAX_BATCH),
        max_degree=MAX_DEGREE,
    )


def for_vllm(asked: Problem) -> Problem:
    """The same with vLLM's engine."""
    return replace(
        asked,
        known=replace(asked.known, profile=COEFFICIENTS["vllm"]),
        settings=Settings(prefill_tokens=VLLM_PREFILL_TOKENS, max_batch=MAX_BATCH),
    )


def told_effort(terms: Terms) -> str:
    """For the sources of a page."""
    first, final = terms.search.first.cap, terms.search.final.cap
    return (
        f"searches look at runs of {first} requests first and up to {final} for contenders; "
        f"tp and pp up to {MAX_DEGREE} within a node"
    )


def searched(asked: Problem, affinities: tuple[Affinity, ...], terms: Terms) -> list[Found]:
    """One search for each affinity; what one simulated serves the next.

    Raises:
        PlacementError: nothing fits, or nothing meets the targets.
    """
    devices = asked.cluster.num_devices

    def watch(what: str, num_done: int, num_steps: int) -> None:
        terms.watch(f"{asked.known.model} on {devices}: {what} {num_done}/{num_steps}")

    with Crew(asked, terms.search, watch) as crew:
        problems = [replace(asked, affinity=affinity) for affinity in affinities]
        return [search(each, terms.search, crew=crew) for each in problems]


def unit_service(candidate: Candidate, asked: Problem, terms: Terms) -> Service:
    """One copy of the candidate, as a search simulates it."""
    return KnownShapes(asked, terms.search).unit(candidate)


def simulated(candidate: Candidate, asked: Problem, terms: Terms, guess: float) -> Goodput:
    """A placement that was not searched for, on the same requests and as closely looked at."""
    service = unit_service(candidate, asked, terms)
    experiment = Experiment(
        run=lambda requests: simulate(service, requests, seed=asked.seed),
        draw=asked.workload.requests,
        slo=asked.slo,
        seed=asked.seed,
        effort=terms.search.final,
    )
    return goodput(experiment, candidate.num_devices, Search(guess))
