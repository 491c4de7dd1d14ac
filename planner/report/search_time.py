"""Figure 12: how long the search takes over the number of GPUs."""

import os

from planner.cluster import Cluster
from planner.latency.published import DEVICE
from planner.placement.choices import Affinity
from planner.placement.results import Found
from planner.report.contents import Cell, Column, Drawing, Line, Origin, Page, Panel, Table
from planner.report.searches import problem, searched, told_effort
from planner.report.terms import Terms
from planner.slo import Slo

MODEL, WORKLOAD, SLO = "opt-66b", "sharegpt", (2.5, 0.15)
CLUSTERS = ((1, 4), (1, 8), (2, 8), (4, 8))
PAPER_LONGEST_S = 78.0  # "less than 1.3 minutes" on 96 cores, section 6.5

Timed = dict[int, tuple[Found, Found]]
"""By the number of devices, Algorithm 2's search and Algorithm 1's."""


def figure_12(terms: Terms) -> Page:
    """Algorithms 2 and 1 on growing clusters."""
    return search_time_page(CLUSTERS, terms)


def search_time_page(clusters: tuple[tuple[int, int], ...], terms: Terms) -> Page:
    """For clusters of so many nodes and devices a node."""
    found = {nodes * each: _timed(Cluster(nodes, each, DEVICE), terms) for nodes, each in clusters}
    cores = len(os.sched_getaffinity(0))
    slowest = max(one.seconds for pair in found.values() for one in pair)
    return Page(
        "fig12",
        "Figure 12: time of the search",
        (
            f"timed here: {MODEL} on {WORKLOAD}, {cores} cores, nothing else set apart for it; "
            f"{told_effort(terms)}",
            "the paper: 96 cores; the heights of its bars are not held, only that the largest "
            f"takes less than {PAPER_LONGEST_S / 60:g} minutes",
        ),
        (_table(found),),
        (Drawing("fig12", (_panel(found),)),),
        (
            f"the longest search took {slowest:.1f} s on {cores} cores, {slowest * cores:.0f} core "
            f"seconds; the paper's bound is {PAPER_LONGEST_S * 96:.0f} core seconds",
            "the paper timed OPT-13B and says that the model does not matter; here it does, by how "
            "many degrees there are coefficients for: fewer for OPT-66B",
            "High searches counts of both roles, where the paper's replicates each phase's best, "
            "and its pulls cross nodes by the slower link where no node has room",
        ),
    )


def _table(found: Timed) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for num_devices, pair in found.items():
        counts = [float(_num_candidates(one)) for one in pair]
        counts += [float(one.num_simulations) for one in pair]
        rows.append((f"{num_devices}", *counts, *(one.seconds for one in pair)))
    columns = [Column("GPUs")]
    for what, form in (("candidates", ".0f"), ("simulations", ".0f"), ("seconds", ".1f")):
        columns += [Column(f"{what}, Low", form), Column("High", form)]
    return Table("search", tuple(columns), tuple(rows))


def _panel(found: Timed) -> Panel:
    at = tuple(map(float, found))
    lines = tuple(
        Line(name, Origin.TIMED, at, tuple(pair[k].seconds for pair in found.values()))
        for k, name in enumerate(("DistServe-Low", "DistServe-High"))
    )
    return Panel("Search", "GPUs", "Seconds", lines)


def _timed(cluster: Cluster, terms: Terms) -> tuple[Found, Found]:
    """Each by itself, so that neither is served by the other."""
    asked = problem(MODEL, WORKLOAD, Slo(*SLO, terms.share), cluster)
    low, high = (searched(asked, (one,), terms)[0] for one in (Affinity.LOW, Affinity.HIGH))
    return low, high


def _num_candidates(found: Found) -> int:
    return len(found.evaluated) + len(found.dropped)
