"""Table 3: the paper's placements, and what the search finds for the same problems.

Where they differ, both are simulated on the same requests.
"""

from dataclasses import dataclass

from ipc.vocabulary import Parallelism
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.paper_curves import published_curve
from planner.placement.candidates import pair
from planner.placement.choices import Affinity, Candidate, Evaluated, Problem
from planner.plan.told import short_candidate
from planner.report import explained
from planner.report.contents import Cell, Column, Page, Table
from planner.report.engines import ROOFLINE_MODEL
from planner.report.published import PlacementRow, placement_rows
from planner.report.searches import problem, searched, simulated, told_effort
from planner.report.terms import Terms
from planner.slo import Slo


@dataclass(frozen=True)
class Both:
    """The paper's placement and ours."""

    row: PlacementRow
    paper: Candidate
    paper_goodput: Goodput
    ours: Evaluated

    @property
    def is_same(self) -> bool:
        return self.paper.groups == self.ours.candidate.groups

    @property
    def told(self) -> str:
        """Whose goodput per device is higher, beyond the intervals or within."""
        if self.is_same:
            return "the same"
        theirs, ours = self.paper_goodput.per_device, self.ours.per_device
        if ours.low > theirs.high:
            return "ours is better"
        return "the paper's is better" if theirs.low > ours.high else "as good"


def table_3(terms: Terms) -> Page:
    """Algorithm 2 on four nodes of eight A100s, as the paper's testbed."""
    return placements_page(placement_rows(), terms)


def placements_page(rows: tuple[PlacementRow, ...], terms: Terms) -> Page:
    """Of some of its rows."""
    found = [compared(row, _problem(row, terms), terms) for row in rows]
    return Page(
        "table3",
        "Table 3: placements, 4 nodes of 8 A100s, low node affinity",
        (
            "placements: the paper's table 3 and this planner's Algorithm 2",
            f"goodput of both: simulated by distserve-raw (OPT-175B: roofline), with 95 % "
            f"intervals; {told_effort(terms)}",
        ),
        (_table(found, terms),),
        notes=_notes(found),
    )


def compared(row: PlacementRow, asked: Problem, terms: Terms) -> Both:
    """Search, and the paper's placement under the same problem."""
    found = searched(asked, (Affinity.LOW,), terms)[0]
    assert found.disaggregated is not None, "without baselines there is nothing else"
    ours = found.disaggregated.best
    paper = paper_candidate(row)
    guess = ours.per_device.value * paper.num_devices
    return Both(row, paper, simulated(paper, asked, terms, guess), ours)


def _problem(row: PlacementRow, terms: Terms) -> Problem:
    curve = published_curve(row.model, row.workload, "distserve")
    slo = Slo(curve.ttft_s, curve.tpot_s, terms.share)
    return problem(row.model, row.workload, slo)


def paper_candidate(row: PlacementRow) -> Candidate:
    """Cut into as many segments as both have stages in common; on one node where they have not."""
    prefill = Parallelism(row.prefill_tp, row.prefill_pp)
    decode = Parallelism(row.decode_tp, row.decode_pp)
    return pair(prefill, decode, prefill.pp if prefill.pp == decode.pp else 1)


def _table(found: list[Both], terms: Terms) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for both in found:
        name = f"{both.row.model} {both.row.workload}"
        paper, ours = both.paper_goodput.per_device, both.ours.per_device
        for label, unit, goodput, told in (
            (name, both.paper, paper, None),
            ("  ours", both.ours.candidate, ours, both.told),
        ):
            rows.append((label, short_candidate(unit), unit.num_devices, _range(goodput), told))
    columns = (
        Column("problem"),
        Column("placement, tp x pp"),
        Column("GPUs", ".0f"),
        Column(f"goodput/GPU at {terms.percent} %"),
        Column("which is better"),
    )
    return Table("the paper's placement, then ours", columns, tuple(rows))


def _notes(found: list[Both]) -> tuple[str, ...]:
    notes = []
    if not all(both.is_same for both in found):
        notes += [explained.FREE_STAGES, explained.SHORT_RUNS]
    if any(both.row.model == ROOFLINE_MODEL for both in found):
        notes.append(explained.experiment_notes(ROOFLINE_MODEL, "sharegpt")[0])
    return tuple(notes)


def _range(interval: Interval) -> str:
    return f"{interval.value:.3g} ({interval.low:.3g}-{interval.high:.3g})"
