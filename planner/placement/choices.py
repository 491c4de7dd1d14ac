"""What the search chooses among, and what it says of each: types alone."""

from dataclasses import dataclass, field
from enum import StrEnum

from ipc.vocabulary import Parallelism, Role
from planner.cluster import Cluster
from planner.deployment import Group, Settings
from planner.errors import PlannerError
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.latency.choose import Knowledge
from planner.slo import Slo
from planner.workload.workload import Workload


class Affinity(StrEnum):
    """How KV may travel: over fast links anywhere (Algorithm 1), or within a node (Algorithm 2)."""

    HIGH = "high"
    LOW = "low"


class Objective(StrEnum):
    """What is best: goodput for each device, the fewest devices for a rate, or plain throughput."""

    GOODPUT = "goodput"
    DEVICES = "devices"
    THROUGHPUT = "throughput"


class System(StrEnum):
    """What kind of service a candidate is."""

    DISAGGREGATED = "disaggregated"
    PREFILL_FIRST = "colocated, prefill first"
    CHUNKED = "colocated, chunked prefill"


@dataclass(frozen=True)
class Candidate:
    """The smallest set of instances that serves alone; a placement is copies of it.

    Args:
        groups: instances of each role and shape. In Algorithm 2 one prefill and one decode; more
            of either where counts are searched too.
        inter_op: pipeline segments shared by prefill and decode: the same stage of both is on one
            node (paper section 4.2). 1 where affinity is high or nothing is pulled.
    """

    system: System
    groups: tuple[Group, ...]
    inter_op: int = 1

    @property
    def num_devices(self) -> int:
        return sum(group.count * group.parallelism.num_workers for group in self.groups)

    def shape(self, role: Role) -> Parallelism | None:
        """Degrees of the instances of that role; None if there are none."""
        return next((g.parallelism for g in self.groups if g.role is role), None)


@dataclass(frozen=True)
class Problem:
    """All that a search is given.

    Args:
        rate: requests per second that the placement must carry; None where only the best unit is
            asked for.
        device_hour_price: of one device, in whatever currency; None leaves costs out.
    """

    known: Knowledge
    cluster: Cluster
    workload: Workload
    slo: Slo
    affinity: Affinity
    objective: Objective = Objective.GOODPUT
    settings: Settings = field(default_factory=Settings)
    rate: float | None = None
    device_hour_price: float | None = None
    seed: int = 0
    max_degree: int | None = None  # largest tp and pp looked at; None: as the cluster allows


@dataclass(frozen=True)
class Dropped:
    """A candidate that was not simulated, and the bound that says why, in words and numbers."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its simulated goodput.

    Args:
        is_rough: from a first look alone, at short runs; it was too far from the best for more.
    """

    candidate: Candidate
    goodput: Goodput
    is_rough: bool = False

    @property
    def per_device(self) -> Interval:
        return self.goodput.per_device


@dataclass(frozen=True)
class Chosen:
    """A candidate copied until it carries the rate (or fills what the objective asks for)."""

    best: Evaluated
    num_copies: int
    rate: Interval

    @property
    def num_devices(self) -> int:
        return self.num_copies * self.best.candidate.num_devices


class PlacementError(PlannerError):
    """No placement can do what is asked, on this cluster."""
