"""`distserve bench --validate`: calibrate on one live run, then predict others and compare."""

import re

from planner.bench.calibrate import Calibration, calibrate
from planner.bench.compare import compare, simulated
from planner.bench.plan import Deployed, Plan, Trace, Validation
from planner.bench.runs import LiveRuns, Run
from planner.bench.sweep import SweepPoint, next_rate
from planner.bench.validation import (
    Knee,
    Trial,
    ValidationReport,
    begins_alike,
    judge,
    knee,
    simulated_knee,
)
from planner.errors import BenchError, ServerFailed
from planner.latency.scaled import SCALES
from planner.simulate.overheads import write_overheads
from planner.simulator.service import Service
from planner.workload.requests import Requests

FILE = "calibration.json"
_MAX_SIMULATED_RUNS = 40


async def validate(plan: Plan, runs: LiveRuns) -> ValidationReport:
    """All of it, one live run after the other; each is saved as soon as it has ended.

    Raises:
        BenchError: the calibration run does not tell what is needed.
        ServerFailed: a run has no answer at all.
    """
    assert plan.deployed is not None, "the command line lets no validation pass without"
    assert plan.validation is not None, "the command line lets no validation pass without"
    return await _Validating(plan, plan.deployed, plan.validation, runs).report()


class _Validating:
    def __init__(
        self, plan: Plan, deployed: Deployed, validation: Validation, runs: LiveRuns
    ) -> None:
        self._plan, self._deployed, self._validation = plan, deployed, validation
        self._runs = runs

    async def report(self) -> ValidationReport:
        run, found, service = await self._calibrated()
        trials: list[Trial] = []
        knees: list[Knee] = []
        for trace in self._validation.tests:
            some = [await self._trial(trace, rate, service) for rate in self._plan.rates]
            trials += some
            if self._validation.wants_knee:
                knees.append(await self._knee(trace, some, service))
        return ValidationReport(
            url=self._plan.url,
            simulate=self._deployed.words,
            target=self._plan.slo.attainment,
            calibration=found,
            calibration_file=str(self._plan.save / FILE),
            calibration_run=run.beside(service, self._plan.slo).measured,
            trials=trials,
            knees=knees,
            notes=self._notes(),
        )

    async def _calibrated(self) -> tuple[Run, Calibration, Service]:
        """The run, what it showed, and the service with it."""
        requests = self._plan.calibration_requests()
        run = await self._live(requests, self._validation.rate, "calibration")
        built = self._deployed.built
        found = calibrate(run.live, built.service)
        if not min(found.prefill_scale, found.decode_scale) >= SCALES[0]:
            raise BenchError(
                "nothing to calibrate on: by its answers, its steps took hardly any time"
            )
        service = found.apply(built.service)
        write_overheads(self._plan.save / FILE, service.overheads, (built.calibration, found))
        return run, found, service

    async def _trial(self, trace: Trace, rate: float, service: Service) -> Trial:
        requests = trace.requests(rate, self._plan.options.seed)
        names = [
            _slug(trace) + (f"-replay-{number}" if number else "")
            for number in range(self._validation.num_replays)
        ]
        replays = [await self._live(requests, rate, name) for name in names]
        timeline = simulated(service, replays[0].live)
        found = compare([run.live for run in replays], timeline, self._plan.slo)
        measured = [run.measured for run in replays]
        return Trial(trace.workload.name, rate, measured, found, judge(found))

    async def _knee(self, trace: Trace, trials: list[Trial], service: Service) -> Knee:
        """The test rates are part of the live sweep."""
        plan, target = self._plan, self._plan.slo.attainment
        points = [SweepPoint(trial.rate, trial.comparison.live) for trial in trials]
        most = len(points) + plan.max_runs
        start = max(plan.rates)
        while len(points) < most and (rate := next_rate(points, target, start=start)) is not None:
            requests = trace.requests(rate, plan.options.seed)
            run = await self._live(requests, rate, _slug(trace))
            points.append(run.point)
        requests = trace.requests(start, plan.options.seed)
        predicted = simulated_knee(
            service, requests, plan.slo, start=start, max_runs=_MAX_SIMULATED_RUNS
        )
        return knee(trace.workload.name, points, predicted, target)

    async def _live(self, requests: Requests, rate: float, name: str) -> Run:
        run = await self._runs.run(requests, rate, name)
        if not run.measured.summary.num_answered:
            first = run.live.failures[0]
            raise ServerFailed(
                f"none of the {len(requests)} requests at {rate:.4g} per second was answered: "
                f"{first.kind}, such as: {first.message}"
            )
        return run

    def _notes(self) -> list[str]:
        plan = self._plan
        calibration = plan.calibration_requests()
        return [
            *self._deployed.notes,
            *(
                f"{trace.workload.name} was tested on the requests of the calibration: its trace "
                "is the same for every seed; give another --test-workload"
                for trace in self._validation.tests
                if begins_alike(calibration, trace.requests(plan.rates[0], plan.options.seed))
            ),
        ]


def _slug(trace: Trace) -> str:
    """A workload's name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", trace.workload.name).strip("-.")
