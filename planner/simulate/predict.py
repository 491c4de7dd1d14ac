"""Carry out a plan: build the service, fit the load to it, run, and put the findings together."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from planner.arguments import requests_at
from planner.errors import PlannerError
from planner.goodput import goodput, slo_sweep
from planner.simulate.build import Built, build
from planner.simulate.fitting_load import FittingLoad, fitting_load
from planner.simulate.options import Plan
from planner.simulate.outlook import first_search, outlook, reasons
from planner.simulate.report import Prediction, Run, instances, run_report
from planner.simulator.run import simulate
from planner.simulator.timeline import Timeline
from planner.verdict import Effort, Experiment, attainment_at, steady
from planner.workload.requests import Requests
from planner.workload.workload import Workload

NUM_SAMPLED = 4_000  # requests for the bounds
MIN_SEARCHED = 100  # requests: fewer say nothing about an attainment
START, CAP = 2_000, 16_000  # requests of a run, where the user gives no number

Watch = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction, and the last run behind it, for those who want every request."""

    prediction: Prediction
    timeline: Timeline | None


def predict(plan: Plan, watch: Watch) -> Predicted:
    """What the deployment will do. `watch` hears what is being simulated.

    Raises:
        PlannerError: the plan cannot be carried out; says why.
    """
    started_s = time.perf_counter()
    built = build(plan.deployment)
    load = fitting_load(plan.load, built)
    sample = _sample(load, plan)
    drafting = plan.deployment.drafting
    tokens_per_step = drafting.tokens_per_step if drafting else 1.0
    bounds = outlook(built, sample, plan.slo, tokens_per_step)
    runs = _Runs(plan, built, load.workload, watch)
    so_far = Prediction(
        model=built.shape.name,
        workload=load.workload.name,
        ttft_target_s=plan.slo.ttft_s,
        tpot_target_s=plan.slo.tpot_s,
        target=plan.slo.attainment,
        num_devices=built.service.num_devices,
        instances=instances(built, sample),
        max_total_tokens=load.max_total_tokens,
        bounds=bounds,
        notes=[*built.notes, *([load.note] if load.note else [])],
        took_s=0.0,
    )
    found = runs.found(so_far)
    found = msgspec.structs.replace(found, took_s=time.perf_counter() - started_s)
    return Predicted(found, runs.last)


def _sample(load: FittingLoad, plan: Plan) -> Requests:
    """For their lengths alone."""
    count = min(NUM_SAMPLED, load.workload.num_rows or NUM_SAMPLED)
    inputs, outputs = load.workload.lengths.draw(count, plan.load.seed)
    return Requests(np.arange(count, dtype=np.float64), inputs, outputs)


class _Runs:
    """Everything that is simulated for a plan: each run is announced, and the last one kept."""

    def __init__(self, plan: Plan, built: Built, workload: Workload, watch: Watch) -> None:
        self.last: Timeline | None = None
        self._plan, self._built, self._workload, self._watch = plan, built, workload, watch

    def found(self, so_far: Prediction) -> Prediction:
        """With what the plan asks for."""
        plan, own_rate = self._plan, self._workload.own_rate
        if plan.scales:
            rate = plan.rates[0] if plan.rates else own_rate
            if rate is None:
                raise PlannerError("--slo-scales needs a --rate at which to look")
            if rate == float("inf"):
                raise PlannerError("--slo-scales needs a rate, but all requests arrive at once")
            sweep = slo_sweep(self._experiment(), rate, plan.scales)
            return msgspec.structs.replace(so_far, scales=sweep)
        if plan.wants_goodput or (not plan.rates and own_rate is None):
            return self._with_goodput(so_far)
        rates = plan.rates or (None,)
        return msgspec.structs.replace(so_far, runs=[self._run(rate) for rate in rates])

    def _with_goodput(self, so_far: Prediction) -> Prediction:
        bounds = so_far.bounds
        found = goodput(self._experiment(), so_far.num_devices, first_search(bounds))
        why = [] if found.rate.value else reasons(bounds, self._plan.slo)
        return msgspec.structs.replace(so_far, goodput=found, notes=[*so_far.notes, *why])

    def _run(self, rate: float | None) -> Run:
        """Exactly the requests asked for, or else as many as a verdict takes."""
        count = self._plan.num_requests
        if rate is None:
            count = count or self._workload.num_rows
        if count is not None:
            return self._exactly(count, rate)
        rate = rate or self._workload.own_rate
        assert rate is not None, "a run without a rate is a trace's"
        point = attainment_at(self._experiment(), rate)
        timeline = self._simulated_last()
        counted, found = steady(timeline).counted, (point.verdict, point.attainment)
        run = run_report(timeline, counted, self._plan.slo, self._built, found)
        return msgspec.structs.replace(run, rate=rate)

    def _exactly(self, count: int, rate: float | None) -> Run:
        """The very requests that `distserve bench` would send, all of them counted."""
        requests = requests_at(self._workload, count, rate, self._plan.load.seed)
        timeline = self._simulate(requests)
        return run_report(timeline, slice(None), self._plan.slo, self._built)

    def _experiment(self) -> Experiment:
        cap = self._plan.num_requests or CAP
        if cap < MIN_SEARCHED:
            raise PlannerError(
                f"--num-requests: in a search a run needs at least {MIN_SEARCHED} requests, "
                f"not {cap}"
            )
        return Experiment(
            run=self._simulate,
            draw=self._workload.requests,
            slo=self._plan.slo,
            seed=self._plan.load.seed,
            effort=Effort(min(START, cap), cap),
        )

    def _simulate(self, requests: Requests) -> Timeline:
        self._watch(f"{len(requests)} requests at {requests.rate:.4g} per second")
        self.last = simulate(self._built.service, requests, seed=self._plan.load.seed)
        return self.last

    def _simulated_last(self) -> Timeline:
        assert self.last is not None, "nothing has run"
        return self.last
