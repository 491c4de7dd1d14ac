"""Attainment, goodput and percentiles over windows."""

import random

import pytest

from daemon.slo import MAX_WINDOW_S, SLOT_S, WINDOWS_S, SloBook, Targets, Verdict

TARGETS = Targets(ttft_s=0.2, tpot_s=0.05)


def test_a_request_meets_the_slo_when_it_meets_both_targets() -> None:
    book = SloBook(TARGETS)
    assert book.judge(0.2, 0.05) == Verdict(True, True)
    assert book.judge(0.201, 0.05) == Verdict(False, True)
    assert not book.judge(0.1, 0.051).both
    assert book.judge(0.1, None).both
    assert SloBook(Targets()).judge(1e9, 1e9).both


def test_a_window_counts_what_ended_in_it_and_forgets_what_is_older() -> None:
    book = SloBook(TARGETS)
    book.answered(1.0, 9.0, 0.01)
    for second in range(100, 160):
        book.answered(float(second), 0.1 if second % 4 else 0.3, 0.01)
    report = book.report(159.9, 60.0)
    assert report.num_requests == 60
    assert (report.num_met_ttft, report.num_met_tpot, report.num_met_both) == (45, 60, 45)
    assert report.attainment == 0.75
    assert report.goodput_per_s == 0.75
    assert book.report(400.0, 60.0).num_requests == 0
    assert book.report(400.0, 60.0).attainment is None


def test_percentiles_are_at_most_a_bucket_too_high() -> None:
    dice, book = random.Random(1), SloBook(TARGETS)
    values = sorted(dice.lognormvariate(-2, 1) for _ in range(2000))
    for value in values:
        book.answered(10.0, value, value / 10)
    told = book.report(10.0, 60.0)
    for share, ttft_s, tpot_s in (
        (0.5, told.ttft.p50_s, told.tpot.p50_s),
        (0.9, told.ttft.p90_s, told.tpot.p90_s),
        (0.99, told.ttft.p99_s, told.tpot.p99_s),
    ):
        exact = values[int(share * 2000) - 1]
        assert ttft_s is not None
        assert tpot_s is not None
        assert exact <= ttft_s <= exact * 1.05001
        assert exact / 10 <= tpot_s <= exact / 10 * 1.05001


def test_a_window_may_end_in_the_past_and_then_knows_nothing_of_what_came_later() -> None:
    book = SloBook(TARGETS)
    book.answered(1003.0, 0.1, 0.01)
    book.answered(1041.0, 0.1, 0.01)
    ends = (989.0, 999.0, 1009.0, 1019.0, 1029.0, 1039.0, 1049.0)
    assert [book.report(end_s, 10.0).num_requests for end_s in ends] == [0, 0, 1, 0, 0, 0, 1]
    assert book.report(1009.0, 60.0).num_requests == 1


def test_the_book_does_not_grow_with_time() -> None:
    book = SloBook(TARGETS)
    for slot in range(2000):
        book.answered(slot * SLOT_S, 0.1, None)
    assert book.report(2000 * SLOT_S, 10 * MAX_WINDOW_S).num_requests == MAX_WINDOW_S / SLOT_S
    assert book.report(2000 * SLOT_S, 60.0).tpot.p50_s is None


def test_a_sliding_window_tells_what_its_slots_do() -> None:
    dice, book = random.Random(5), SloBook(TARGETS)
    ended: list[tuple[float, float]] = []
    now_s = 0.0
    for _ in range(3000):
        now_s += dice.expovariate(0.5)
        ttft_s = dice.choice((0.1, 0.3))
        ended.append((now_s, ttft_s))
        book.answered(now_s, ttft_s, None)
        if dice.random() < 0.05:
            now_s += dice.choice((0.0, 30.0, 400.0))
            window_s = dice.choice(WINDOWS_S)
            first = int((now_s - window_s) // SLOT_S) + 1
            within = [ttft for at, ttft in ended if at // SLOT_S >= first]
            report = book.report(now_s, window_s)
            assert report.num_requests == len(within)
            assert report.num_met_both == within.count(0.1)
            if within:
                worst_s = max(within)
                assert report.ttft.p99_s == pytest.approx(worst_s, rel=0.05)
