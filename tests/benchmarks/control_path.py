"""What a step costs beside the arithmetic where an instance has several workers.

`python -m tests.benchmarks.control_path`. The real scheduler and plan bus, with 64 choices in
decode and three followers, each a process of its own: the leader plans and sends, every follower
decodes the plan, one of them answers with 64 drawn tokens, and the leader takes them in. No model
is run, so a step is all overhead. On fewer cores than processes the others' turns are in it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing

from rich.console import Console
from rich.table import Table

from gpu_workers.group import drawer, ranks
from gpu_workers.plan_bus import FollowerBus, LeaderBus, Waiting
from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from gpu_workers.step_plan import Row, RowResult, StepResult
from ipc.messages import MixedPolicy, Prefill
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Parallelism, Role, SamplingParams, WorkerName

BATCH = 64
NUM_STEPS = 3000
NUM_WARM_UP = 200
SHAPES = (Parallelism(4, 1), Parallelism(2, 2), Parallelism(1, 4))
TARGET_US = 300
PARTS = ("plan", "send", "decode and answer", "collect", "in all")


def main() -> int:
    if len(sys.argv) > 1:
        follow(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), is_answering=sys.argv[4] == "1")
        return 0
    table = Table("us, median / p99", *(f"tp {s.tp}, pp {s.pp}" for s in SHAPES))
    columns = [measure(shape) for shape in SHAPES]
    for index, part in enumerate(PARTS):
        figures = [[step[index] * 1e6 for step in column] for column in columns]
        table.add_row(part, *(f"{statistics.median(f):.0f} / {p99(f):.0f}" for f in figures))
    console = Console()
    console.print(table)
    console.print(f"batch {BATCH}, {os.cpu_count()} cores; target: {TARGET_US} us in all")
    return 0


def measure(shape: Parallelism) -> list[tuple[float, ...]]:
    """Seconds of each part, for each step. One step under way at a time, of all choices."""
    names = ranks("here", shape)
    # Where the leader draws, another rank answers in its place: a little more than it costs.
    answering = drawer("here", shape) if shape.pp > 1 else names[-1]
    with tempfile.TemporaryDirectory(prefix="ds-") as directory, ExitStack() as undo:
        endpoint = f"ipc://{directory}/plans.ipc"
        bus = undo.enter_context(closing(LeaderBus(endpoint, names[1:])))
        for name in names[1:]:
            process = undo.enter_context(start(endpoint, name, is_answering=name == answering))
            undo.callback(process.wait)
        bus.gather(60.0)
        scheduler = running_scheduler(bus)
        steps = [step(scheduler, bus) for _ in range(NUM_WARM_UP + NUM_STEPS)]
        bus.dismiss()
    return steps[NUM_WARM_UP:]


def running_scheduler(bus: LeaderBus) -> Scheduler:
    """With the whole batch in decode."""
    scheduler = Scheduler(
        Owner("here", 1),
        Role.MIXED,
        MixedPolicy(),
        num_blocks=BATCH * 300,
        block_size=16,
        limits=BatchLimits(prefill_tokens=BATCH * 16, max_batch=BATCH),
        parallelism=Parallelism(2, 1),  # has followers, and all choices are in each step
    )
    for request_id in range(BATCH):
        sampling = SamplingParams(max_tokens=2 * (NUM_STEPS + NUM_WARM_UP), seed=0)
        prompt = tuple(range(16))
        scheduler.prefill(
            Prefill(request_id, request_id, (1000 + request_id,), (0,), prompt, (), sampling)
        )
    while scheduler.decodes.num_running < BATCH:
        step(scheduler, bus)
    return scheduler


def step(scheduler: Scheduler, bus: LeaderBus) -> tuple[float, ...]:
    """Seconds of planning, sending, waiting for the answer, taking it in, and all of it."""
    began_s = time.perf_counter()
    plan = scheduler.plan()
    assert plan is not None
    planned_s = time.perf_counter()
    bus.send(plan)
    sent_s = time.perf_counter()
    scheduler.launched(plan, sent_s)
    result = bus.result(plan.step_id, 60.0)
    answered_s = time.perf_counter()
    scheduler.collect(result, started_s=sent_s, ended_s=answered_s)
    scheduler.outbox.clear()
    ended_s = time.perf_counter()
    return (
        planned_s - began_s,
        sent_s - planned_s,
        answered_s - sent_s,
        ended_s - answered_s,
        ended_s - began_s,
    )


def start(endpoint: str, name: WorkerName, *, is_answering: bool) -> subprocess.Popen[bytes]:
    where = (endpoint, str(name.stage), str(name.tp_rank), str(int(is_answering)))
    return subprocess.Popen([sys.executable, "-m", "tests.benchmarks.control_path", *where])


def follow(endpoint: str, stage: int, tp_rank: int, *, is_answering: bool) -> None:
    """Decode plans; one follower answers as a rank that draws."""
    with closing(FollowerBus(endpoint, WorkerName("here", stage, tp_rank))) as feed:
        waiting = Waiting(feed.waitables)
        while not feed.is_dismissed:
            waiting(None)
            for plan in feed.receive():
                if is_answering:
                    rows = tuple(answer(row) for row in plan.rows if row.draws)
                    feed.report(StepResult(plan.step_id, rows))


def answer(row: Row) -> RowResult:
    return RowResult(row.sequence, (7,))


def p99(figures: list[float]) -> float:
    return statistics.quantiles(figures, n=100)[98]


if __name__ == "__main__":
    sys.exit(main())
