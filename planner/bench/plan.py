"""What a bench command runs: one workload at some rates, or a calibration and its tests."""

from dataclasses import dataclass
from pathlib import Path

from planner.arguments import requests_at
from planner.bench.options import ReplayOptions
from planner.simulate.build import Built
from planner.slo import Slo
from planner.workload.requests import Requests
from planner.workload.workload import Workload


@dataclass(frozen=True)
class Trace:
    """So many requests of a workload."""

    workload: Workload
    num_requests: int

    def requests(self, rate: float | None, seed: int) -> Requests:
        """Without a rate, at the trace's own times."""
        return requests_at(self.workload, self.num_requests, rate, seed)


@dataclass(frozen=True)
class Deployed:
    """What is believed to run behind the URL.

    Args:
        words: the options of `distserve simulate` that say so.
        notes: what a reader must know of them, and of requests that do not fit.
    """

    words: str
    built: Built
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Validation:
    """Calibrate on one trace, then test on others.

    Args:
        calibration: its own trace; its requests are of another seed than those of the tests.
        num_replays: of each test trace: the same requests so many times.
        wants_knee: search the goodput of each test trace, live and simulated.
    """

    calibration: Trace
    rate: float
    tests: tuple[Trace, ...]
    num_replays: int
    wants_knee: bool


@dataclass(frozen=True)
class Plan:
    """What to run. `rates` is empty where the workload's own times are replayed, or a sweep has
    to find its rates; a sweep begins at `start`."""

    url: str
    trace: Trace
    slo: Slo
    options: ReplayOptions
    rates: tuple[float, ...]
    start: float | None
    max_runs: int
    save: Path
    plot: Path | None
    is_json: bool
    deployed: Deployed | None = None
    validation: Validation | None = None

    @property
    def is_sweep(self) -> bool:
        return self.start is not None

    def requests(self, rate: float | None) -> Requests:
        """One run's; without a rate, at the trace's own times."""
        return self.trace.requests(rate, self.options.seed)

    def calibration_requests(self) -> Requests:
        """Of a seed that no test has."""
        assert self.validation is not None, "only a validation calibrates"
        return self.validation.calibration.requests(self.validation.rate, self.options.seed + 1)
