"""Sampling in rounds, with a clock that moves as the points say."""

import random
from collections.abc import Callable

import pytest

from gpu_workers.profiling.rounds import (
    Budget,
    relative_spread,
    sample_in_rounds,
    settled_median,
)


class Stage:
    """A clock, and points that take the time they say and note their turn."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def point(self, name: str, ms: Callable[[float], float]) -> Callable[[], float]:
        def once() -> float:
            taken_ms = ms(self.now_s)
            self.now_s += taken_ms / 1000
            self.turns.append(name)
            return taken_ms

        return once

    def sample(self, budget: Budget, **points: Callable[[float], float]) -> dict[str, list[float]]:
        once = {name: self.point(name, ms) for name, ms in points.items()}
        return sample_in_rounds(once, budget, clock=self.clock)


def steady(ms: float) -> Callable[[float], float]:
    return lambda now_s: ms


def test_every_round_visits_every_point_once() -> None:
    stage = Stage()
    budget = Budget(total_s=100, visit_s=0, max_rounds=3)
    stage.sample(budget, a=steady(10), b=steady(20), c=steady(30))
    assert [sorted(stage.turns[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3
    assert len(stage.turns) == 9


def test_a_quick_point_is_repeated_within_its_visit() -> None:
    samples = Stage().sample(Budget(100, 0.05, 2), quick=steady(10), slow=steady(200))
    assert (len(samples["quick"]), len(samples["slow"])) == (10, 2)


def test_nothing_is_begun_that_would_end_after_the_time_is_up() -> None:
    stage = Stage()
    samples = stage.sample(Budget(5.0, 0, 1000), a=steady(400), b=steady(300))
    assert 4.3 <= stage.now_s <= 5.0
    assert len(samples["a"]) >= 6


def test_the_first_round_is_completed_whatever_it_takes() -> None:
    samples = Stage().sample(Budget(1.0, 0, 5), a=steady(3000), b=steady(2000))
    assert samples == {"a": [3000], "b": [2000]}


def test_a_long_point_leaves_its_turns_to_the_others() -> None:
    quick = {f"quick{i}": steady(100) for i in range(9)}
    samples = Stage().sample(Budget(30.0, 0, 5), long=steady(6000), **quick)
    assert len(samples["long"]) == 3
    assert all(len(samples[name]) == 5 for name in quick)


def test_a_noisy_while_spoils_a_sample_of_each_and_no_median() -> None:
    def disturbed(now_s: float) -> float:
        return 300 if 4 <= now_s < 6 else 100

    points = dict.fromkeys("abcdefgh", disturbed)
    samples = Stage().sample(Budget(100, 0, 9), **points)
    assert any(300 in taken for taken in samples.values())
    assert {settled_median(taken) for taken in samples.values()} == {100}


def test_the_first_run_warms_up_and_counts_only_where_there_is_no_other() -> None:
    assert settled_median([900, 10, 12]) == 11
    assert settled_median([900]) == 900


def test_progress_rises_to_one() -> None:
    stage, seen = Stage(), list[float]()
    points = {"a": stage.point("a", steady(100)), "b": stage.point("b", steady(200))}
    sample_in_rounds(points, Budget(2.0, 0, 20), progress=seen.append, clock=stage.clock)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


def test_the_spread_is_the_standard_deviation_of_repeats_whatever_drifts_or_interrupts() -> None:
    noise = random.Random(1)
    samples = []
    for ms in (5, 50, 500):
        repeats = [ms * (1 + 0.001 * i) * noise.gauss(1, 0.03) for i in range(300)]
        for i in range(0, 300, 20):
            repeats[i] *= 4
        samples.append(repeats)
    assert relative_spread(samples) == pytest.approx(0.03, rel=0.25)


def test_without_repeats_no_spread_is_known() -> None:
    assert relative_spread([[3.0], [4.0, 4.1]]) == 0.0
