"""The step loop with several steps under way: when it launches, collects and waits."""

from collections import deque
from collections.abc import Sequence

from gpu_workers.leader import Leader
from gpu_workers.step_plan import StepPlan, StepResult
from ipc.messages import Command, Event, Exit, Prefilled, Tokens
from ipc.vocabulary import Role
from tests.gpu_workers.rig import Rig, prefill
from tests.gpu_workers.scripted_engine import ScriptedExecutor


class SlowPipeline:
    """A pipeline whose steps end one by one, and only when the leader waits for something."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        self._executor = executor
        self._under_way: deque[int] = deque()
        self._ended: set[int] = set()
        self.log: list[str] = []

    def launch(self, plan: StepPlan) -> StepResult:
        if plan.rows:
            self.log.append(f"launch {plan.step_id}")
            self._under_way.append(plan.step_id)
        return self._executor.launch(plan)

    def is_done(self, launched: StepResult) -> bool:
        return launched.step_id in self._ended

    def collect(self, launched: StepResult) -> StepResult:
        if launched.rows:
            while launched.step_id not in self._ended:
                self.end_oldest()
            self.log.append(f"collect {launched.step_id}")
        return launched

    def end_oldest(self) -> None:
        self._ended.add(self._under_way.popleft())

    @property
    def is_idle(self) -> bool:
        return not self._under_way


class WakingLink:
    """Hands out batches of commands; where the leader waits without end, a step ends."""

    def __init__(self, pipeline: SlowPipeline, *batches: Sequence[Command]) -> None:
        self._pipeline = pipeline
        self._batches = deque(batches)
        self.events: list[Event | Tokens] = []

    def send(self, event: Event | Tokens) -> None:
        self.events.append(event)

    def receive(self, timeout_s: float | None) -> list[Command]:
        if timeout_s is not None:
            return []
        self._pipeline.log.append("wait")
        if self._batches:
            return list(self._batches.popleft())
        if self._pipeline.is_idle:
            return [Exit()]
        self._pipeline.end_oldest()
        return []


def lead(*batches: Sequence[Command], max_in_flight: int = 2) -> tuple[WakingLink, SlowPipeline]:
    rig = Rig(Role.PREFILL, max_tokens=8)
    pipeline = SlowPipeline(rig.executor)
    link = WakingLink(pipeline, *batches)
    leader = Leader(
        link,
        rig.scheduler,
        pipeline,
        rig.exchange,
        lambda peer: None,
        max_in_flight=max_in_flight,
        is_done=pipeline.is_done,
    )
    leader.run()
    return link, pipeline


def test_a_second_step_is_launched_before_the_first_has_ended_and_no_third() -> None:
    prompts = [prefill(request_id, 8) for request_id in (1, 2, 3)]
    link, pipeline = lead(prompts)
    steps = [entry for entry in pipeline.log if entry != "wait"]
    assert steps[:3] == ["launch 1", "launch 2", "collect 1"]
    assert sum(isinstance(event, Prefilled) for event in link.events) == 3


def test_it_wakes_when_the_only_step_ends_without_any_command() -> None:
    link, pipeline = lead([prefill(1, 8)])
    assert pipeline.log == ["wait", "launch 1", "wait", "collect 1", "wait"]
    assert any(isinstance(event, Prefilled) for event in link.events)


def test_a_command_that_comes_while_a_step_runs_fills_the_pipeline() -> None:
    _, pipeline = lead([prefill(1, 8)], [prefill(2, 8)])
    assert pipeline.log[:5] == ["wait", "launch 1", "wait", "launch 2", "collect 1"]


def test_what_is_under_way_at_the_exit_is_collected() -> None:
    link, pipeline = lead([prefill(1, 8)], [Exit()])
    assert pipeline.log == ["wait", "launch 1", "wait", "collect 1"]
    assert any(isinstance(event, Prefilled) for event in link.events)
