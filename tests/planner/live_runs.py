"""Live runs made by hand: every time in them is chosen."""

from collections.abc import Sequence

import numpy as np

from planner.bench.events import Answer, StageTimes
from planner.bench.live_run import Clocks, Failure, LiveRun, live_run
from planner.workload.requests import Requests

START_S = 50.0  # of the clock that answers are timed with


def run_of(
    results: Sequence[Answer | Failure],
    *,
    late_s: float = 0.001,
    output_tokens: int = 3,
    duration_s: float = 10.0,
) -> LiveRun:
    """Request k arrives at second k and asks for 10 tokens in, `output_tokens` out."""
    count = len(results)
    arrival_s = np.arange(count, dtype=np.float64)
    requests = Requests(arrival_s, np.full(count, 10), np.full(count, output_tokens))
    clocks = Clocks(START_S, START_S + duration_s, client_cpu_s=1.0)
    return live_run(requests, arrival_s + late_s, results, clocks)


def answered(*event_s: float, stages: StageTimes | None = None) -> Answer:
    """One token at each of these seconds after the run's start."""
    times_s = tuple(START_S + at for at in event_s)
    return Answer(times_s, len(times_s), is_counted=True, input_tokens=10, stages=stages)
