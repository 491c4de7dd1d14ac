"""Deadlines by hand-set clocks."""

import gc
import random
import weakref

from daemon.deadlines import Deadlines


def test_what_is_due_comes_soonest_first_and_once() -> None:
    deadlines = Deadlines[str]()
    for name, due_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 4.0)):
        deadlines.set(name, due_s)
    assert deadlines.next_s == 1.0
    assert deadlines.take_due(3.0) == ["a", "b", "c"]
    assert deadlines.take_due(3.0) == []
    assert deadlines.next_s == 4.0


def test_a_later_word_replaces_an_earlier_one_and_what_has_happened_is_not_due() -> None:
    deadlines = Deadlines[str]()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    deadlines.set("b", 2.0)
    deadlines.drop("b")
    deadlines.drop("b")
    assert deadlines.next_s == 5.0
    assert deadlines.take_due(4.0) == []
    assert deadlines.take_due(5.0) == ["a"]
    assert (deadlines.next_s, len(deadlines)) == (None, 0)


def test_those_due_at_the_same_moment_keep_their_order() -> None:
    deadlines = Deadlines[int]()
    for number in range(50):
        deadlines.set(number, 1.0)
    assert deadlines.take_due(1.0) == list(range(50))


def test_a_request_that_ended_early_is_not_kept_until_its_time_is_up() -> None:
    class Request:
        pass

    deadlines = Deadlines[Request]()
    latest = weakref.ref(Request())
    for number in range(10_000):
        request = Request()
        deadlines.set(request, 3600.0 + number)
        deadlines.drop(request)
        latest = weakref.ref(request)
        del request
    gc.collect()
    assert latest() is None
    assert len(deadlines._heap) < 100


def test_every_order_of_setting_dropping_and_looking_agrees_with_a_plain_list() -> None:
    chance = random.Random(7)
    deadlines, plain = Deadlines[int](), dict[int, float]()
    now_s = 0.0
    for _ in range(5_000):
        item, what = chance.randrange(40), chance.random()
        if what < 0.5:
            due_s = now_s + chance.randrange(30)
            deadlines.set(item, due_s)
            plain[item] = due_s
        elif what < 0.8:
            deadlines.drop(item)
            plain.pop(item, None)
        else:
            now_s += chance.randrange(4)
            due = sorted(i for i, due_s in plain.items() if due_s <= now_s)
            assert sorted(deadlines.take_due(now_s)) == due
            for i in due:
                del plain[i]
        assert deadlines.next_s == min(plain.values(), default=None)
