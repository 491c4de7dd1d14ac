"""Series of rates, a search that copies one unit, and an oracle that knows the whole series.

The oracle counts as the planner does: devices at what they could serve, misses at their weight,
a switch at its cost. It differs in that it does not forecast: it adds up the coming hours.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from ipc.vocabulary import Parallelism, Role
from planner.cluster import Cluster
from planner.deployment import Group
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.latency.choose import Knowledge
from planner.placement.choices import (
    Affinity,
    Candidate,
    Chosen,
    Evaluated,
    Problem,
    System,
)
from planner.replan.decide import Tools, replan
from planner.replan.outcome import Action, Current, Outcome
from planner.replan.recent import Log
from planner.replan.rules import Rules
from planner.replan.switching import Fleet
from planner.replan.window import Pattern, Window, rate_windows
from planner.slo import Slo
from planner.workload.catalogue import parse_workload
from planner.workload.requests import Floats
from tests.planner.reference_data import DATA

UNIT = Candidate(
    System.DISAGGREGATED,
    (Group(Role.PREFILL, 1, Parallelism()), Group(Role.DECODE, 1, Parallelism())),
)
SLO = Slo(0.2, 0.1)
PROBLEM = Problem(
    known=Knowledge("opt-13b", device="a100-sxm"),
    cluster=Cluster(16, 8, "a100-sxm"),
    workload=parse_workload("sharegpt"),
    slo=SLO,
    affinity=Affinity.HIGH,
)


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def unit_goodput(rate: float) -> Goodput:
    """As a search would have found it for the unit, without a doubt."""
    return Goodput(
        rate=exactly(rate),
        per_device=exactly(rate / UNIT.num_devices),
        target=SLO.attainment,
        limited_by="TTFT",
        is_bounded=True,
        points=(),
        num_runs=0,
    )


def copies_of(goodput: float, candidate: Candidate = UNIT) -> Tools:
    """A search that copies the unit until it carries the rate."""

    def search(problem: Problem) -> Chosen:
        assert problem.rate is not None
        num_copies = max(math.ceil(problem.rate / goodput - 1e-9), 1)
        best = Evaluated(candidate, unit_goodput(goodput))
        return Chosen(best, num_copies, exactly(num_copies * goodput))

    return Tools(search=search, copy_goodput=lambda *_: unit_goodput(goodput))


def serving(num_copies: int, goodput: float, planned: Pattern, since_s: float = 0.0) -> Current:
    return Current(Fleet(UNIT, num_copies), exactly(num_copies * goodput), planned, since_s)


def series_file(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def azure_2024(trace: str) -> Floats:
    with series_file("azure_2024_rate.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["trace"] == trace]
    return np.array([float(row["rate_rps"]) for row in rows])


def servegen(model: str) -> Floats:
    """Up to the last window in which anybody came: two models end after a day."""
    with series_file("servegen_rate.csv").open(encoding="utf-8", newline="") as file:
        rates = np.array([float(row[f"{model}_rps"]) for row in csv.DictReader(file)])
    return rates[: int(np.flatnonzero(rates)[-1]) + 1]


@dataclass(frozen=True)
class Replay:
    """What replanning did over a series: copies that served in each window, and its outcomes."""

    windows: tuple[Window, ...]
    copies: tuple[int, ...]
    outcomes: tuple[Outcome, ...]  # after each window

    def at(self, *actions: Action) -> list[int]:
        return [i for i, o in enumerate(self.outcomes) if o.verdict.action in actions]


def replayed(
    windows: Sequence[Window], current: Current, tools: Tools, rules: Rules, memory: int = 72
) -> Replay:
    """Ask after each window, and obey."""
    copies: list[int] = []
    outcomes: list[Outcome] = []
    for index in range(len(windows)):
        copies.append(current.fleet.num_copies)
        log = Log(tuple(windows[max(index + 1 - memory, 0) : index + 1]))
        outcomes.append(replan(log, current, PROBLEM, tools, rules))
        current = outcomes[-1].current
    return Replay(tuple(windows), tuple(copies), tuple(outcomes))


@dataclass(frozen=True, eq=False)
class Oracle:
    """Knows the whole series, may switch every least interval, and finds the cheapest schedule.

    Dynamic programming from the end: the value of having so many copies at a window is the least
    over what it could switch to, of the switch, the interval with that, and the value after it.
    """

    rates: Floats
    goodput: float
    window_s: float
    rules: Rules
    up_cost: float  # requests for one more copy
    down_cost: float
    most: int = 80

    @property
    def stride(self) -> int:
        """Windows between two decisions."""
        return round(self.rules.least_interval_s / self.window_s)

    @cached_property
    def ahead(self) -> Floats:
        """What it costs, from each window on, to have so many copies now, (T, K) in requests."""
        num, stride = len(self.rates), self.stride
        values = np.zeros((num + stride, self.most))
        ahead = np.zeros((num, self.most))
        for index in reversed(range(num)):
            ahead[index] = self._interval_losses[index] + values[index + stride]
            values[index] = (self._switches + ahead[index]).min(axis=1)
        return ahead

    def wants(self, index: int, num_copies: int) -> int:
        """What it would have from this window on, in place of `num_copies`."""
        return int(np.argmin(self._switches[num_copies - 1] + self.ahead[index])) + 1

    def copies(self, first: int) -> list[int]:
        """What it would have had in each window."""
        now, had = first, []
        for index in range(len(self.rates)):
            if index % self.stride == 0:
                now = self.wants(index, now)
            had.append(now)
        return had

    @cached_property
    def _interval_losses(self) -> Floats:
        """Devices at what they could serve, misses at their weight, until the next decision."""
        copies = np.arange(1, self.most + 1) * self.goodput
        missed = np.maximum(self.rates[:, None] - copies, 0.0) * SLO.attainment
        each = self.window_s * (copies + missed / (1 - SLO.attainment))
        total = np.vstack([np.zeros(self.most), np.cumsum(each, axis=0)])
        starts = np.arange(len(self.rates))
        return np.asarray(total[np.minimum(starts + self.stride, len(starts))] - total[starts])

    @cached_property
    def _switches(self) -> Floats:
        """From each number to each, (K, K)."""
        more = np.arange(self.most)[None, :] - np.arange(self.most)[:, None]
        return np.where(more > 0, more * self.up_cost, -more * self.down_cost)


def windows_of(rates: Floats, window_s: float) -> tuple[Window, ...]:
    return rate_windows([float(rate) for rate in rates], window_s)
