"""What prompts are said to take: from steps that ran, and from a measured table."""

import pytest

from daemon.prefill_times import MIN_STEPS, PrefillBook, StepTimes, TableTimes
from ipc.profile_table import PrefillPoint, ProfileTable
from ipc.vocabulary import DType, Parallelism


def table(*points: tuple[int, int, float], tp: int = 1, pp: int = 1) -> ProfileTable:
    return ProfileTable(
        model="tiny",
        device="cpu",
        kernels="torch",
        dtype=DType.FP32,
        tp=tp,
        pp=pp,
        block_size=16,
        num_threads=1,
        saturation_tokens=128,
        kv_bytes_per_token=64,
        prefill=tuple(PrefillPoint(*point) for point in points),
        decode=(),
    )


POINTS = ((1, 16, 12.0), (1, 32, 14.0), (4, 32, 40.0), (1, 128, 40.0), (1, 512, 200.0))


def measured(*steps: tuple[int, float, float], has_more: bool = True) -> StepTimes:
    times = StepTimes()
    for num_tokens, started_s, ended_s in steps:
        times.saw(num_tokens, started_s, ended_s, has_more=has_more)
    return times


def test_nothing_is_known_before_some_steps_have_run() -> None:
    book, one = PrefillBook(), Parallelism()
    assert book.of("p0", one) is None
    for step in range(MIN_STEPS):
        assert book.of("p0", one) is None
        book.steps_of("p0", one).saw(100, float(step), step + 1.0, has_more=True)
    times = book.of("p0", one)
    assert times is not None
    assert times.queued_s([200]) == times.alone_s(200) == pytest.approx(2.0)
    assert book.of("p1", one) is None
    assert book.of("p0", Parallelism(2, 1)) is None, "under another placement"


def test_prompts_that_shared_a_step_shared_its_time() -> None:
    times = measured((100, 0.0, 1.0), (100, 1.0, 2.0), (60, 1.0, 2.0), (40, 1.0, 2.0))
    assert len(times._steps) == 2
    assert times._steps[1].token_s == pytest.approx(1 / 200)


def test_while_prompts_wait_what_keeps_an_instance_from_the_next_step_counts() -> None:
    """Steps of 1 s, between which its pool stays full for 3 s."""
    steps = [(100, 4.0 * i + 3, 4.0 * i + 4) for i in range(10)]
    assert measured(*steps, has_more=True).token_s == pytest.approx(0.04)
    assert measured(*steps, has_more=False).token_s == pytest.approx(0.01)


def test_prompts_of_several_steps_at_a_time_count_once() -> None:
    """Chunks and pipelines: each takes 3 s, one ends every second."""
    steps = [(100, float(i), i + 3.0) for i in range(20)]
    for has_more in (True, False):
        assert measured(*steps, has_more=has_more).token_s == pytest.approx(0.01)


def test_many_short_prompts_and_one_sleep_of_the_machine_do_not_move_the_estimate() -> None:
    times, now_s = StepTimes(), 0.0
    for i in range(60):
        num_tokens, took_s = (500, 5.0) if i % 3 == 0 else (2, 0.5)
        took_s += 3600 if i == 30 else 0
        times.saw(num_tokens, now_s, now_s + took_s, has_more=False)
        now_s += took_s
    assert times.token_s == pytest.approx(0.01)


def test_a_load_that_has_changed_is_followed() -> None:
    times = measured(*[(100, float(i), i + 1.0) for i in range(100)])
    for i in range(100, 164):
        times.saw(100, 2.0 * i, 2 * i + 2.0, has_more=True)
    assert times.token_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("num_tokens", "alone_ms"),
    [(1, 12.0), (16, 12.0), (24, 13.0), (128, 40.0), (320, 120.0), (896, 360.0)],
)
def test_between_measured_lengths_a_table_is_interpolated_and_goes_on_beyond(
    num_tokens: int, alone_ms: float
) -> None:
    assert TableTimes(table(*POINTS)).alone_s(num_tokens) == pytest.approx(alone_ms / 1000)


def test_prompts_that_wait_cost_their_share_of_a_packed_step() -> None:
    times = TableTimes(table(*POINTS))
    assert times.queued_s([32]) == pytest.approx(0.010)
    assert times.queued_s([16]) == pytest.approx(0.010)  # was only measured alone
    assert times.queued_s([8]) == pytest.approx(0.005)
    assert times.queued_s([512, 8, 32]) == pytest.approx(0.215)


def test_the_stages_of_a_pipeline_work_at_the_same_time() -> None:
    times = TableTimes(table(*POINTS, pp=2))
    assert times.queued_s([512]) == pytest.approx(0.1)
    assert times.alone_s(512) == pytest.approx(0.2)


def test_a_table_answers_for_its_own_shape_alone() -> None:
    book = PrefillBook(table(*POINTS, tp=2))
    assert book.of("p0", Parallelism(1, 1)) is None
    times = book.of("p0", Parallelism(2, 1))
    assert times is not None
    assert times.alone_s(128) == pytest.approx(0.04)
