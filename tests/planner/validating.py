"""A validation without a wire: live runs are simulated ones, with corrections that are hidden."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ipc.vocabulary import Role
from planner.arguments import Load
from planner.bench.calibrate import Calibration
from planner.bench.live_run import LiveRun
from planner.bench.options import ReplayOptions
from planner.bench.plan import Deployed, Plan, Trace, Validation
from planner.bench.runs import LiveRuns, Send
from planner.model_catalog import model_shape
from planner.simulate.build import Built
from planner.simulate.command import as_run
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.workload.lengths import LengthRules
from planner.workload.requests import Requests
from tests.planner.line_model import instance

SERVICE = Service((instance(Role.PREFILL), instance(Role.DECODE)))
RULES = LengthRules(max_total_tokens=2048)


def trace(name: str, count: int) -> Trace:
    return Trace(Load(name, None, RULES, seed=0).parsed(), count)


def plan(folder: Path, *, tests: list[str], num_replays: int = 1, wants_knee: bool = False) -> Plan:
    return Plan(
        url="http://nowhere",
        trace=trace("sharegpt", 400),
        slo=Slo(ttft_s=0.3, tpot_s=0.042),
        options=ReplayOptions(),
        rates=(2.0, 2.5),
        start=None,
        max_runs=6,
        save=folder,
        plot=None,
        is_json=False,
        deployed=Deployed("--model line", Built(SERVICE, (), model_shape("opt-1.3b"), ()), ()),
        validation=Validation(
            calibration=trace("sharegpt", 200),
            rate=1.5,
            tests=tuple(trace(name, 400) for name in tests),
            num_replays=num_replays,
            wants_knee=wants_knee,
        ),
    )


def hidden(truth: Calibration, sent: list[Requests]) -> Send:
    """A service that is slower than its profile says."""

    async def send(requests: Requests, options: ReplayOptions) -> LiveRun:
        from_zero = replace(requests, arrival_s=requests.arrival_s - requests.arrival_s[0])
        sent.append(from_zero)
        options.on_end(len(requests))
        return as_run(simulate(truth.apply(SERVICE), from_zero))

    return send


def live_runs(asked: Plan, send: Send) -> LiveRuns:
    return LiveRuns(send, asked.options, asked.slo, folder=asked.save, watch=_nobody)


def _nobody(_: str, __: int) -> Callable[[int], None]:
    return lambda num_ended: None
