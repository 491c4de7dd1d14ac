"""The simulator: how fast it is, and how its curves lie beside the paper's measured ones.

make bench-simulator [ARGS='--seeds 100']
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group, Settings, service
from planner.goodput import goodput
from planner.latency.choose import Knowledge
from planner.paper_curves import (
    COEFFICIENTS,
    PublishedCurve,
    crossing,
    published_curves,
    simulated_curve,
)
from planner.rate_search import Search
from planner.simulator.run import simulate
from planner.slo import Slo
from planner.verdict import Effort, Experiment
from planner.workload.catalogue import parse_workload

REPEATS = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="runs behind each point")
    seeds = parser.parse_args().seeds
    console = Console()
    show_speed(console)
    for curve in published_curves():
        if curve.engine in COEFFICIENTS and curve.num_requests is not None:
            show_curve(curve, range(seeds), console)


def show_speed(console: Console) -> None:
    """OPT-13B as the paper placed it, ShareGPT."""
    groups = (Group(Role.PREFILL, 1, Parallelism(2)), Group(Role.DECODE, 1))
    setup = service(Knowledge("opt-13b", profile="distserve-raw"), groups, Settings())
    load = parse_workload("sharegpt")
    requests = load.requests(1000, 4.5, seed=0)
    run_ms = median_ms(lambda: simulate(setup, requests))
    step_ms = median_ms(lambda: simulate(setup, requests, max_skip=1), repeats=3)
    experiment = Experiment(
        lambda drawn: simulate(setup, drawn),
        load.requests,
        Slo(0.25, 0.1),
        effort=Effort(2000, 4000),
    )
    search_ms = median_ms(lambda: goodput(experiment, 3, Search(guess=4.0)), repeats=3)
    console.print(f"1,000 requests through 1P+1D: {run_ms:.1f} ms (bar 25 ms)", highlight=False)
    console.print(f"  the same, step by step: {step_ms:.0f} ms", highlight=False)
    console.print(f"  a goodput search: {search_ms:.0f} ms", highlight=False)


def show_curve(curve: PublishedCurve, seeds: range, console: Console) -> None:
    """Measured and simulated attainment, and the goodput at 90 %."""
    points = simulated_curve(curve, seeds)
    name = f"{curve.model} {curve.workload}, {curve.engine}"
    table = Table("req/s per GPU", "measured", "simulated", "one more run, 95 %", "", title=name)
    for measured, ours in zip(curve.points, points, strict=True):
        holds = "in" if ours.holds(measured) else "out"
        table.add_row(
            f"{ours.per_device_rate:g}",
            f"{measured.attainment:.1f}",
            f"{ours.mean:.1f}",
            f"{ours.low:.1f} to {ours.high:.1f}",
            holds if ours.is_decided or holds == "in" else "undecided",
        )
    console.print(table)
    errors = np.array([o.mean - m.attainment for m, o in zip(curve.points, points, strict=True)])
    rates = [point.per_device_rate for point in points]
    ours_at_90 = crossing(rates, [point.mean for point in points], 90.0)
    console.print(
        f"goodput at 90 %: measured {curve.goodput():.3f}, simulated {ours_at_90:.3f}; "
        f"mean error {errors.mean():+.1f} points, absolute {np.abs(errors).mean():.1f}\n",
        highlight=False,
    )


def median_ms(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """After one run to warm up."""
    run()
    timings = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        timings.append(time.perf_counter() - started_s)
    return 1000 * statistics.median(timings)


if __name__ == "__main__":
    main()
