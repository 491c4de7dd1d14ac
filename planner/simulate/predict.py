"""Carry out a plan: build the service, fit the load to it, run, and put the findings together."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from planner.arguments import requests_at
from planner.errors import PlannerError
from planner.goodput import goodput, slo_sweep
from planner.intervals import Interval
from planner.simulate.build import Built, build
from planner.simulate.fitting_load import FittingLoad, fitting_load
from planner.simulate.options import Plan
from planner.simulate.outlook import Outlook, first_search, outlook, reasons
from planner.simulate.report import Prediction, Run, instances, run_report
from planner.simulator.run import simulate
from planner.simulator.timeline import Timeline
from planner.verdict import Effort, Experiment, Verdict, attainment_at, steady
from planner.workload.requests import Requests
from planner.workload.workload import Workload

NUM_SAMPLED = 4_000  # requests for the bounds
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
    stage = _Stage(plan, built, load.workload, watch)
    prediction = Prediction(
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
    found = stage.found(prediction, bounds)
    found = msgspec.structs.replace(found, took_s=time.perf_counter() - started_s)
    return Predicted(found, stage.last)


def _sample(load: FittingLoad, plan: Plan) -> Requests:
    """For lengths alone; so the rate does not matter."""
    workload = load.workload
    count = min(NUM_SAMPLED, workload.num_rows or NUM_SAMPLED)
    inputs, outputs = workload.lengths.draw(count, plan.load.seed)
    return requests_of(inputs, outputs)


class _Stage:
    """Where runs happen: each is announced, and the last one kept."""

    def __init__(self, plan: Plan, built: Built, workload: Workload, watch: Watch) -> None:
        self.last: Timeline | None = None
        self._plan, self._built, self._workload, self._watch = plan, built, workload, watch

    def found(self, so_far: Prediction, bounds: Outlook) -> Prediction:
        """With what the plan asks for."""
        plan = self._plan
        if plan.wants_goodput:
            return self._with_goodput(so_far, bounds)
        if plan.scales:
            sweep = slo_sweep(self._experiment(), self._one_rate(), plan.scales)
            return msgspec.structs.replace(so_far, scales=sweep)
        rates = plan.rates or (None,)
        return msgspec.structs.replace(so_far, runs=[self._run(rate) for rate in rates])
