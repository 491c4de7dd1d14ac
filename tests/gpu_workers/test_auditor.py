"""When the books are looked over, and what is said of faults."""

import logging

import pytest

from gpu_workers.auditor import AUDIT_INTERVAL_S, Auditor


class Books:
    """Counts the looks; finds what it is told to find."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.num_looks = 0

    def audit(self) -> list[str]:
        self.num_looks += 1
        return self.faults


def test_it_looks_at_intervals_and_at_once_when_asked() -> None:
    books = Books()
    auditor = Auditor(books.audit)
    for now_s in (1.0, 1.1, 1.2):
        auditor.look(now_s)
    assert books.num_looks == 1
    auditor.demand()
    auditor.look(1.2)
    assert books.num_looks == 2
    auditor.look(1.2 + AUDIT_INTERVAL_S + 0.1)
    assert books.num_looks == 3


def test_a_fault_is_logged_and_counted_once_and_its_end_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    books = Books()
    auditor = Auditor(books.audit)

    def look(*faults: str) -> list[str]:
        caplog.clear()
        books.faults = list(faults)
        auditor.demand()
        auditor.look(1.0)
        return caplog.messages

    assert look("a block lost") == ["block audit: a block lost"]
    assert look("a block lost") == []
    assert look("a block lost", "another") == ["block audit: another"]
    assert (auditor.num_faults, auditor.num_standing) == (2, 2)
    assert look() == ["block audit: the books agree again"]
    assert look() == []
    assert (auditor.num_faults, auditor.num_standing) == (2, 0), "old ones are told from new ones"
    assert look("a block lost") == ["block audit: a block lost"]
    assert auditor.num_faults == 3
