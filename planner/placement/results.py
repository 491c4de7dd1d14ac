"""What a search hands back: plain frozen values, all of which become JSON."""

from dataclasses import dataclass

from planner.deployment import Group
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.placement.choices import Affinity, Candidate, Chosen, Dropped, Evaluated, Objective
from planner.slo import Slo


@dataclass(frozen=True)
class Asked:
    """What the answer is to, in names and numbers."""

    model: str
    device: str
    num_nodes: int
    devices_per_node: int
    workload: str
    slo: Slo
    affinity: Affinity
    objective: Objective
    rate: float | None
    device_hour_price: float | None
    seed: int


@dataclass(frozen=True)
class Phase:
    """One phase alone: so many equal instances, the other phase costing nothing."""

    group: Group
    goodput: Goodput


@dataclass(frozen=True)
class RunnerUp:
    """The next best. `is_tie`: within the best one's interval, and no smaller."""

    evaluated: Evaluated
    is_tie: bool


@dataclass(frozen=True)
class Baseline:
    """The best colocated service of one kind, against the best disaggregated one.

    Args:
        unit: one instance, as the search found it; None where none can serve, for `reason`.
        scaled: as many instances as the disaggregated placement has devices for (4 at most),
            behind one dispatcher; or the unit again, where that carries more per device.
        gain: goodput per device of the disaggregated one over the baseline's. Its interval takes
            both to be independent; they saw the same requests, so it is wider than it must be.
        attainment_gain: share of requests that meet the SLO, at the rate per device of the
            disaggregated goodput, less the baseline's; paired by request.
    """

    name: str
    unit: Evaluated | None
    scaled: Evaluated | None = None
    gain: Interval | None = None
    attainment_gain: Interval | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Sensitivity:
    """The recommended placement where the world is a little different.

    Args:
        attainment: at the same rate, except where the change is the rate's.
        per_device: goodput then, by a first look; None where the change does not touch it.
    """

    change: str
    attainment: Interval | None
    per_device: Interval | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Cost:
    """In the currency of the device's price, at the rate carried."""

    per_hour: float
    per_thousand_requests: float
    per_million_tokens: float
    per_million_output_tokens: float


@dataclass(frozen=True)
class Found:
    """The answer of one search.

    Args:
        recommended: what to deploy, colocated or not.
        disaggregated: the best of those, even where it is not recommended.
        reasons: why, in whole sentences.
        evaluated: everything that was simulated as a whole, the best first.
        dropped: everything that was not, each with its reason.
    """

    asked: Asked
    recommended: Chosen
    disaggregated: Chosen | None
    reasons: tuple[str, ...]
    runner_ups: tuple[RunnerUp, ...]
    phases: tuple[Phase, ...]
    evaluated: tuple[Evaluated, ...]
    dropped: tuple[Dropped, ...]
    baselines: tuple[Baseline, ...]
    sensitivity: tuple[Sensitivity, ...]
    cost: Cost | None
    seconds: float
    num_simulations: int
    num_processes: int

    @property
    def best(self) -> Candidate:
        return self.recommended.best.candidate
