"""What a user asks to be planned, checked in form and not yet in substance."""

from dataclasses import dataclass
from pathlib import Path

from planner.arguments import Load
from planner.deployment import Settings
from planner.latency.choose import Knowledge
from planner.placement.choices import Affinity, Objective
from planner.placement.options import Options
from planner.slo import Slo


@dataclass(frozen=True)
class Nodes:
    """The machines; `names` is empty where only their number was given."""

    count: int
    devices_each: int
    device: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """What becomes of the answer.

    Args:
        out: the placement file.
        plot: a folder for all figures, or one SVG for the attainment over the rate.
        shows_all: every candidate that was dropped, not only how many for which reason.
    """

    out: Path | None = None
    plot: Path | None = None
    is_json: bool = False
    shows_all: bool = False


@dataclass(frozen=True)
class Replanning:
    """A log of requests to hold against the placement in use."""

    log: Path
    current: Path


@dataclass(frozen=True)
class Asked:
    """One command. `affinities` are searched one after the other, and the better one is taken."""

    known: Knowledge
    nodes: Nodes
    load: Load
    slo: Slo
    settings: Settings
    affinities: tuple[Affinity, ...]
    objective: Objective
    search: Options
    output: Output
    rate: float | None = None
    device_hour_price: float | None = None
    max_degree: int | None = None
    replanning: Replanning | None = None
