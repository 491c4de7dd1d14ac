"""How parts of a pool are asked for: the door, the line, and the messages."""

import itertools
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import kv_bounce
from ipc.kv_bounce import MAX_RUNS, NoAsking, OwnerGone, Unanswered


def test_a_handle_can_be_looked_at_by_all_and_after_its_owners_end() -> None:
    door, descriptor = kv_bounce.make_door(b"how to open it")
    for _ in range(2):
        assert kv_bounce.read_document(descriptor) == b"how to open it"
    door.close()
    assert kv_bounce.read_document(descriptor) == b"how to open it"
    os.close(descriptor)


def test_a_door_that_nobody_attends_is_not_waited_for() -> None:
    """Its owner stands still: who knocks is told, sooner or later, and never held up."""
    door, descriptor = kv_bounce.make_door(b"how to open it")
    memory = os.memfd_create("slots")
    lines: list[kv_bounce.Line] = []
    knocks = (kv_bounce.knock(descriptor, memory) for _ in range(5000))
    with pytest.raises(Unanswered, match="the pool's owner cannot be asked: Resource"):
        lines.extend(knocks)
    for line in lines:
        line.close()
    door.close()
    os.close(descriptor)
    os.close(memory)


RUNS = st.lists(st.tuples(*[st.integers(0, (1 << 64) - 1)] * 2), max_size=20)


@given(slot=st.integers(0, 3), runs=RUNS)
def test_what_is_asked_is_what_is_heard(slot: int, runs: list[tuple[int, int]]) -> None:
    assert kv_bounce.parse_asking(kv_bounce.pack_asking(slot, runs)) == (slot, runs)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_asking_or_refused(message: bytes) -> None:
    try:
        slot, runs = kv_bounce.parse_asking(message)
    except NoAsking:
        return
    assert slot >= 0
    assert len(message) == 16 * (len(runs) + 1)


def test_the_longest_asking_is_one_message() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runs = list(itertools.repeat((1, 2), MAX_RUNS))
    line = kv_bounce.Line(ours)
    line.ask(1, runs)
    assert kv_bounce.read_asking(theirs) == (1, runs)
    line.close()
    assert kv_bounce.read_asking(theirs) is None
    theirs.close()


@pytest.fixture
def ends() -> Iterator[tuple[kv_bounce.Line, socket.socket]]:
    """An importer's and its owner's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = kv_bounce.Line(ours)
    yield line, theirs
    line.close()
    theirs.close()


@pytest.mark.parametrize("num_filled", [0, 2])
def test_who_is_sent_away_hears_why_also_when_it_goes_on_to_ask(
    ends: tuple[kv_bounce.Line, socket.socket], num_filled: int
) -> None:
    line, theirs = ends
    line.ask(0, [(0, 1)])  # which nobody reads
    for slot in range(num_filled):
        kv_bounce.say_filled(theirs, slot)
    kv_bounce.send_away(theirs, "no memory")
    with pytest.raises(Unanswered, match="serves us no more: no memory") as told:
        line.ask(1, [(0, 1)])
    assert not isinstance(told.value, OwnerGone)


def test_who_waits_when_it_is_sent_away_hears_why(
    ends: tuple[kv_bounce.Line, socket.socket],
) -> None:
    line, theirs = ends
    kv_bounce.send_away(theirs, "no memory " * 1000)
    with pytest.raises(Unanswered, match="serves us no more: no memory"):
        line.await_filled()
    with pytest.raises(OwnerGone, match="has ended"):
        line.await_filled()


def test_who_has_left_need_not_be_told(ends: tuple[kv_bounce.Line, socket.socket]) -> None:
    line, theirs = ends
    line.close()
    kv_bounce.send_away(theirs, "no memory")
    assert theirs.fileno() == -1
