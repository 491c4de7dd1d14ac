"""What came of late, and how it fades."""

import pytest

from daemon.recent_prompts import RecentPrompts


def test_a_steady_stream_is_told_by_its_rate_and_the_mean_of_its_lengths() -> None:
    recent = RecentPrompts(window_s=10.0)
    for number in range(1000):
        recent.came(0, 100 if number % 2 else 200, 0.1 * number)
    ((rate, num_tokens),) = recent.below(1, 100.0)
    assert rate == pytest.approx(10.0, rel=0.01)
    assert num_tokens == pytest.approx(150, abs=1)


def test_only_what_is_of_a_lower_level_is_told() -> None:
    recent = RecentPrompts()
    for level in (0, 1, 2):
        recent.came(level, 100 * level + 50, 5.0)
    assert [num_tokens for _, num_tokens in recent.below(2, 5.0)] == [50, 150]
    assert recent.below(0, 5.0) == []


def test_what_came_long_ago_counts_for_nothing() -> None:
    recent = RecentPrompts(window_s=10.0)
    recent.came(0, 100, 5.0)
    ((now, _),), ((later, _),) = recent.below(1, 5.0), recent.below(1, 105.0)
    assert now == pytest.approx(0.1)
    assert later < now / 10_000
    assert recent.below(1, 1e9) == []
