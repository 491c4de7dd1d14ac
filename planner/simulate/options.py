"""What a user asks to be predicted, checked in form and not yet in substance."""

from dataclasses import dataclass, field
from pathlib import Path

from planner.arguments import Load
from planner.bench.calibrate import Calibration
from planner.deployment import Group, Settings
from planner.latency.choose import Knowledge
from planner.slo import Slo


@dataclass(frozen=True)
class Bits:
    """Of weights, of keys and values, and of the arithmetic; None: as the model has them."""

    weights: float | None = None
    kv: float | None = None
    compute: int | None = None


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding: `num_drafted` tokens a step, each accepted with that probability.

    Without a draft model drafts cost nothing, as when they are looked up in the prompt.
    """

    num_drafted: int
    acceptance: float
    model: str | None = None

    @property
    def tokens_per_step(self) -> float:
        """(1 - a^(g+1)) / (1 - a) on average (arXiv 2211.17192, equation 1)."""
        return (1 - self.acceptance ** (self.num_drafted + 1)) / (1 - self.acceptance)


@dataclass(frozen=True)
class Deployment:
    """The instances and everything that decides how fast they are and how much they hold.

    Args:
        kv_cache_gib: of each device, for keys and values; None: what the weights leave.
        across_nodes: pulls go over the network instead of the links within a node.
        calibration: corrections that a live run showed (`bench --validate`).
    """

    known: Knowledge
    groups: tuple[Group, ...]
    settings: Settings
    bits: Bits = field(default_factory=Bits)
    drafting: Drafting | None = None
    kv_cache_gib: float | None = None
    across_nodes: bool = False
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(frozen=True)
class Plan:
    """One command.

    Args:
        rates: none for the goodput search, and for a trace at its own times.
        num_requests: exactly so many, all of them counted; None: as many as a verdict takes.
        scales: an SLO-scale sweep at the one rate.
    """

    deployment: Deployment
    load: Load
    slo: Slo
    rates: tuple[float, ...]
    num_requests: int | None
    wants_goodput: bool
    scales: tuple[float, ...]
    save: Path | None
    plot: Path | None
    is_json: bool
