"""Live runs as a command makes them: sent, saved at once, summarised, and simulated if asked."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from planner.bench.compare import Comparison, compare, simulated
from planner.bench.live_run import LiveRun
from planner.bench.options import ReplayOptions
from planner.bench.report import Summary, summarise
from planner.bench.run_file import write_run
from planner.bench.sweep import SweepPoint
from planner.errors import BenchError
from planner.simulator.service import Service
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.workload.requests import Requests

Watch = Callable[[str, int], Callable[[int], None]]
Send = Callable[[Requests, ReplayOptions], Awaitable[LiveRun]]

_SEEDS_APART = 1_000_000


class Measured(msgspec.Struct, frozen=True):
    """One run's figures, where its trace is, and how its simulation compares."""

    rate: float
    trace: str
    summary: Summary
    comparison: Comparison | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """A run with its report, and what the simulator made of the same requests."""

    measured: Measured
    live: LiveRun
    timeline: Timeline | None = None

    @property
    def point(self) -> SweepPoint:
        return SweepPoint(self.measured.rate, self.measured.summary.attainment)

    @property
    def simulated_point(self) -> SweepPoint | None:
        found = self.measured.comparison
        return None if found is None else SweepPoint(self.measured.rate, found.simulated)

    def beside(self, service: Service, slo: Slo) -> "Run":
        """With the simulation of the same requests."""
        timeline = simulated(service, self.live)
        comparison = compare([self.live], timeline, slo)
        measured = msgspec.structs.replace(self.measured, comparison=comparison)
        return Run(measured, self.live, timeline)


class LiveRuns:
    """Runs against one service. Each has prompts of its own, so that none finds another's in a
    prefix cache; the first has those of the seed itself."""

    def __init__(
        self, send: Send, options: ReplayOptions, slo: Slo, *, folder: Path, watch: Watch
    ) -> None:
        self._send, self._options, self._slo = send, options, slo
        self._folder, self._watch = folder, watch
        self._started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self._num_runs = 0
        _make(folder)

    async def run(self, requests: Requests, rate: float | None, name: str = "") -> Run:
        """Send all, wait for the last answer, write the trace. Without a rate: at own times."""
        label = "own times" if rate is None else f"{rate:.4g}/s"
        on_end = self._watch(f"{name} {label}".strip(), len(requests))
        seed = self._options.seed + _SEEDS_APART * self._num_runs
        self._num_runs += 1
        live = await self._send(requests, replace(self._options, seed=seed, on_end=on_end))
        rate = live.requests.rate if rate is None else rate
        parts = [self._started, *([name] if name else []), f"rate-{rate:.4g}"]
        trace = self._folder / f"{'-'.join(parts)}.csv"
        write_run(trace, live)
        return Run(Measured(rate, str(trace), summarise(live, self._slo)), live)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--save: {folder} cannot be made: {error.strerror}") from error
