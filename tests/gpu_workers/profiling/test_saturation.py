"""L_m is where throughput comes near its best, and a noisy measurement does not move it far."""

import math
import random
from collections.abc import Callable

import pytest

from gpu_workers.profiling.saturation import SATURATION, is_near_knee, saturation_tokens
from ipc.profile_table import PrefillPoint

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def point(tokens: int, tokens_per_s: float) -> PrefillPoint:
    return PrefillPoint(1, tokens, 1000 * tokens / tokens_per_s)


def curve(
    step_ms: Callable[[int], float], noise: random.Random | None = None
) -> list[PrefillPoint]:
    """Single prompts of all lengths; with noise, the quickest of five runs of each."""
    return [
        PrefillPoint(1, n, step_ms(n) * (min(slowdowns(noise)) if noise else 1.0)) for n in LENGTHS
    ]


def slowdowns(noise: random.Random) -> list[float]:
    """2 % of noise, and every third run slowed by others, up to twice the time."""
    return [
        math.exp(noise.gauss(0, 0.02)) * (noise.uniform(1, 2) if noise.random() < 1 / 3 else 1.0)
        for _ in range(5)
    ]


def processor(num_tokens: int) -> float:
    """Saturated by short prompts, then slower and slower: attention grows with the square."""
    return 6 + 0.98 * num_tokens + 1.2e-4 * num_tokens**2


def accelerator(num_tokens: int) -> float:
    """A floor, then a slope."""
    return max(12.0, 4 + 0.05 * num_tokens + 1e-6 * num_tokens**2)


def first_measured(points: list[PrefillPoint]) -> int:
    """The rule without smoothing, for comparison."""
    best = max(p.tokens_per_s for p in points)
    return next(p.num_tokens for p in points if p.tokens_per_s >= SATURATION * best)


def test_the_shortest_prompt_near_the_best_throughput_saturates() -> None:
    rising = [point(16, 300), point(64, 700), point(128, 901), point(256, 1000)]
    assert 64 < saturation_tokens(rising) <= 128
    assert saturation_tokens(rising[::-1]) == saturation_tokens(rising)


def test_the_crossing_is_interpolated_between_measured_lengths() -> None:
    rising = [point(25, 225), point(50, 450), point(100, 900)]
    assert saturation_tokens([*rising, point(200, 1800), point(400, 2000), point(800, 2000)]) == 200
    flat = [point(200, 1500), point(400, 1500), point(800, 1500)]
    # 1350 per second lie between 900 and 1500 as 173 lies between 100 and 200, in logarithms.
    assert saturation_tokens([*rising, *flat]) == 173


def test_prompts_together_have_no_part_in_it() -> None:
    points = curve(processor)
    together = PrefillPoint(8, 64, 1000 * 8 * 64 / 5000)
    assert saturation_tokens([*points, together]) == saturation_tokens(points)


def test_a_device_that_any_prompt_saturates_is_saturated_by_the_shortest() -> None:
    assert saturation_tokens([point(16, 5)]) == 16
    assert saturation_tokens([point(n, 1000) for n in LENGTHS]) == 16


def test_falling_throughput_of_long_prompts_does_not_move_it() -> None:
    short = [point(16, 300), point(32, 500), point(64, 800), point(128, 1000), point(256, 1000)]
    long = [point(512, 700), point(1024, 500), point(2048, 300)]
    assert saturation_tokens([*short, *long]) == saturation_tokens(short)


def test_one_prompt_that_seemed_quick_does_not_move_it() -> None:
    true = curve(processor)
    lucky = [point(p.num_tokens, 1.3 * p.tokens_per_s) if p.num_tokens == 1024 else p for p in true]
    assert first_measured(lucky) == 1024
    assert saturation_tokens(lucky) == pytest.approx(saturation_tokens(true), rel=0.1)


@pytest.mark.parametrize("step_ms", [processor, accelerator])
def test_noise_moves_it_by_less_than_half_where_the_plain_rule_doubles(
    step_ms: Callable[[int], float],
) -> None:
    true = saturation_tokens(curve(step_ms))
    noisy = [curve(step_ms, random.Random(seed)) for seed in range(200)]
    found = sorted(saturation_tokens(points) for points in noisy)
    plain = sorted(first_measured(points) for points in noisy)
    assert true / 1.5 < found[10] <= found[-10] < 1.5 * true
    assert found[100] == pytest.approx(true, rel=0.1)
    assert plain[-10] >= 2 * plain[10]


def test_lengths_within_a_factor_of_four_are_near_the_knee() -> None:
    assert [n for n in LENGTHS if is_near_knee(n, 100)] == [32, 64, 128, 256]
