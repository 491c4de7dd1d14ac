"""What a search says beside its placements: what was asked, what it costs, why there is nothing."""

from collections import Counter
from collections.abc import Sequence

from planner.placement.choices import Affinity, Chosen, Dropped, Evaluated, Problem
from planner.placement.ranking import most_carried
from planner.placement.results import Asked, Cost
from planner.workload.requests import Requests


def asked(problem: Problem) -> Asked:
    """The problem in names and numbers."""
    cluster = problem.cluster
    return Asked(
        model=problem.known.model,
        device=cluster.device,
        num_nodes=cluster.num_nodes,
        devices_per_node=cluster.devices_per_node,
        workload=problem.workload.name,
        slo=problem.slo,
        affinity=problem.affinity,
        objective=problem.objective,
        rate=problem.rate,
        device_hour_price=problem.device_hour_price,
        seed=problem.seed,
    )


def cost(problem: Problem, best: Chosen, sample: Requests) -> Cost | None:
    """At the rate asked for, or else at the goodput; None without a price."""
    if problem.device_hour_price is None:
        return None
    per_hour = best.num_devices * problem.device_hour_price
    per_request = per_hour / 3600 / (problem.rate or best.rate.value)
    inputs, outputs = float(sample.input_tokens.mean()), float(sample.output_tokens.mean())
    return Cost(
        per_hour=per_hour,
        per_thousand_requests=1e3 * per_request,
        per_million_tokens=1e6 * per_request / (inputs + outputs),
        per_million_output_tokens=1e6 * per_request / outputs,
    )


def nothing_fits(problem: Problem, dropped: Sequence[Dropped]) -> str:
    """No shape is left: the commonest reason of the largest candidates says the most."""
    where = f"{problem.known.model} fits nowhere on {_cluster(problem)}"
    if not dropped:
        both = "a node has" if problem.affinity is Affinity.LOW else "there are"
        return f"{where}: {both} too few devices for a prefill and a decode instance"
    reasons = Counter(_essence(one.reason) for one in dropped)
    largest = max(
        dropped, key=lambda one: (one.candidate.num_devices, reasons[_essence(one.reason)])
    )
    return f"{where}: of {len(dropped)} candidates the largest was refused as {largest.reason}"


def misses_targets(problem: Problem, found: Sequence[Evaluated]) -> str:
    """Shapes run, but not even an idle one meets the targets."""
    slo = problem.slo
    why = next((each.goodput.limited_by for each in found), "they are too slow")
    return (
        f"no placement of {problem.known.model} on {_cluster(problem)} meets TTFT "
        f"{1000 * slo.ttft_s:g} ms and TPOT {1000 * slo.tpot_s:g} ms for {slo.attainment:.0%} of "
        f"the requests at any rate ({why})"
    )


def too_much(problem: Problem, found: Sequence[Evaluated]) -> str:
    """The rate is out of reach."""
    most = most_carried(found, problem.cluster)
    return (
        f"no placement of {problem.known.model} on {_cluster(problem)} carries {problem.rate:g} "
        f"requests/s: the best found carries {most:.3g} on all of it"
    )


def _cluster(problem: Problem) -> str:
    cluster = problem.cluster
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    return f"{nodes} of {cluster.devices_per_node} {cluster.device}"


def _essence(reason: str) -> str:
    """Without the shape that it was said of."""
    return reason.partition(": ")[2]
