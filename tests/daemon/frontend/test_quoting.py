import pytest

from daemon.frontend.quoting import quoted


def test_words_stay_and_are_cut() -> None:
    assert quoted("naïve 世界 🎉") == "naïve 世界 🎉"
    assert quoted("x" * 5000, 7) == "x" * 7


@pytest.mark.parametrize("char", ["\n", "\x1b", "\x00", "\u2028", "\u202e", "\x7f"])
def test_what_is_not_printable_is_replaced(char: str) -> None:
    assert quoted(f"a{char}b") == "a\ufffdb"
