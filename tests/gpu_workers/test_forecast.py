"""Until when a step may take: later than it does, and not for ever."""

import pytest

from gpu_workers.forecast import FORGET, LEAP, SAFETY, Forecast, work_of
from gpu_workers.step_plan import Pull, Row, StepPlan
from ipc.vocabulary import KVHandle


def prompt(num_tokens: int) -> StepPlan:
    return StepPlan(step_id=1, rows=(Row(1, num_tokens, True),))


def decodes(batch: int) -> StepPlan:
    return StepPlan(step_id=1, rows=tuple(Row(i, 1, True) for i in range(batch)))


def seen(*steps: tuple[StepPlan, float]) -> Forecast:
    forecast = Forecast()
    for plan, took_s in steps:
        forecast.observe(work_of(plan), took_s)
    return forecast


def test_before_the_first_step_a_large_model_on_one_core_is_expected() -> None:
    """14 GFLOP a token at 100 GFLOP/s."""
    assert Forecast().longest_s(work_of(prompt(2048))) > 2048 * 0.14


@pytest.mark.parametrize("num_tokens", [128, 2048, 4096, 16384])
def test_a_long_prompt_is_foreseen_from_short_ones(num_tokens: int) -> None:
    """SmolLM2-135M on a core: 593 ms at 512 tokens, 3.0 s at 2,048; attention as a quadratic."""
    took_s = 1.07e-3 * num_tokens + 2.0e-7 * num_tokens**2
    forecast = seen((prompt(512), 0.593), *[(decodes(8), 0.0246)] * 5)
    longest_s = forecast.longest_s(work_of(prompt(num_tokens)))
    assert took_s < longest_s < 20 * took_s


def test_decodes_alone_foretell_a_prompt() -> None:
    forecast = seen(*[(decodes(1), 0.0125)] * 100)
    assert 3.0 < forecast.longest_s(work_of(prompt(2048))) < 60.0


def test_a_pull_is_more_work_than_none() -> None:
    pull = Pull(KVHandle("there", 1, 2, (0,), 4000), (1,))
    assert work_of(StepPlan(step_id=1, pulls=(pull,))) > work_of(StepPlan(step_id=1)) + 3000


def test_a_step_that_was_stopped_counts_twice_at_most_and_is_forgotten() -> None:
    plan = decodes(8)
    usual_s = seen((plan, 0.02)).longest_s(work_of(plan))
    assert usual_s == pytest.approx(SAFETY * 0.02)
    forecast = seen((plan, 0.02), (plan, 30.0))
    assert forecast.longest_s(work_of(plan)) == pytest.approx(LEAP * usual_s)
    for _ in range(10):
        forecast.observe(work_of(plan), 0.02)
    assert forecast.longest_s(work_of(plan)) == pytest.approx(usual_s)
    assert FORGET**10 * LEAP < 1


def test_a_machine_that_has_become_slow_is_learned_within_a_few_steps() -> None:
    plan = prompt(512)
    forecast = seen((plan, 0.6), *[(plan, 6.0)] * 5)
    assert forecast.longest_s(work_of(plan)) == pytest.approx(SAFETY * 6.0)
