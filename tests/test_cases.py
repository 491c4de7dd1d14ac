"""The list of cases is whole, and says what the tests say."""

from tests.cases import CASES, EXCUSED
from tests.list_cases import LIST, covering, rendered


def test_every_case_is_shown_by_a_test_or_does_not_apply() -> None:
    tests_of = covering()
    assert [case for case in CASES if case not in tests_of and case not in EXCUSED] == []


def test_no_test_names_a_case_that_there_is_not() -> None:
    assert {case: tests for case, tests in covering().items() if case not in CASES} == {}


def test_what_does_not_apply_has_no_test_and_is_little() -> None:
    assert set(EXCUSED) <= set(CASES)
    assert not set(EXCUSED) & set(covering())
    assert len(CASES) - len(EXCUSED) >= 90


def test_the_list_is_fresh() -> None:
    assert LIST.read_text(encoding="utf-8") == rendered(covering()), (
        "make it anew: python -m tests.list_cases"
    )
