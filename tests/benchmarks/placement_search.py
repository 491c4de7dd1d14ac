"""How long a placement search takes: the paper's OPT-66B on 4 nodes of 8 A100, Algorithms 1 and 2.

By the published coefficients, ShareGPT's lengths, 2.5 s and 150 ms for 90 %. Once with one process
and once with all cores; the answers must be the same.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass

from rich.console import Console

from planner.cluster import Cluster
from planner.deployment import Settings
from planner.latency.choose import Knowledge
from planner.placement.choices import Affinity, Candidate, Problem
from planner.placement.options import Options
from planner.placement.results import Found
from planner.placement.search import search, search_both
from planner.slo import Slo
from planner.workload.catalogue import parse_workload
from planner.workload.lengths import LengthRules

LIMIT_S = 10.0


def problem() -> Problem:
    return Problem(
        known=Knowledge("opt-66b", profile="distserve-raw"),
        cluster=Cluster(num_nodes=4, devices_per_node=8, device="a100-sxm4-80gb"),
        workload=parse_workload("sharegpt", rules=LengthRules(max_total_tokens=2048)),
        slo=Slo(ttft_s=2.5, tpot_s=0.15),
        affinity=Affinity.HIGH,
        settings=Settings(max_batch=1024),
    )


@dataclass(frozen=True)
class Timed:
    """Wall seconds of both algorithms, the processes' start included, and what all cores did."""

    wall_s: float
    cpu_s: float
    found: tuple[Found, Found]


def timed(num_processes: int) -> Timed:
    options = Options(num_processes=num_processes, with_baselines=False, with_sensitivity=False)
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    found = search_both(problem(), options)
    return Timed(time.perf_counter() - start_s, cpu_s() - start_cpu_s, found)


def cpu_s() -> float:
    """Of this process and those that have ended under it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def line(name: str, found: Found) -> str:
    best = found.recommended.best
    rate = best.per_device
    return (
        f"{name}: {shape(best.candidate)}, {best.candidate.num_devices} devices, "
        f"{rate.value:.3f} requests/s each ({rate.low:.3f} to {rate.high:.3f}); "
        f"{found.num_simulations} simulations, {len(found.evaluated)} placements, "
        f"{len(found.dropped)} dropped"
    )


def shape(candidate: Candidate) -> str:
    return " + ".join(
        f"{g.count} {g.role} tp {g.parallelism.tp} pp {g.parallelism.pp}" for g in candidate.groups
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="baselines and sensitivity as well")
    asked = parser.parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)
    cores = len(os.sched_getaffinity(0))
    one, many = timed(1), timed(cores)
    for name, found in zip(("Algorithm 1", "Algorithm 2"), many.found, strict=True):
        console.print(line(name, found))
    is_same = [f.evaluated for f in one.found] == [f.evaluated for f in many.found]
    console.print(
        f"1 process: {one.wall_s:.1f} s ({one.cpu_s:.1f} s of computing); {cores} processes: "
        f"{many.wall_s:.1f} s ({many.cpu_s:.1f} s), {one.wall_s / many.wall_s:.2f} times as fast; "
        f"{'the same' if is_same else 'OTHER'} answers"
    )
    if asked.whole:
        whole = search(problem(), Options(num_processes=cores))
        console.print(f"Algorithm 1 with baselines and sensitivity: {whole.seconds:.1f} s")
    return 0 if is_same and many.wall_s < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
