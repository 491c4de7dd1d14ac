"""Places for connections: in all, for one peer, and those that rest give theirs up."""

from daemon.connection_book import MAX_TURNED_AWAY, ConnectionBook


class Guest:
    """A connection that remembers being asked to leave."""

    def __init__(self) -> None:
        self.has_left = False

    def leave(self) -> None:
        self.has_left = True


def test_one_more_than_there_are_places_for_is_turned_away() -> None:
    book = ConnectionBook(2, 2)
    assert [book.admit(Guest(), f"peer {i}") for i in range(3)] == [True, True, False]


def test_a_place_is_free_when_its_connection_is_closed() -> None:
    book = ConnectionBook(1, 1)
    first = Guest()
    assert book.admit(first, "a")
    book.release(first)
    book.release(first)
    assert book.num_open == 0
    assert book.admit(Guest(), "a")


def test_one_peer_leaves_places_for_others() -> None:
    book = ConnectionBook(4, 3)
    assert [book.admit(Guest(), "a") for _ in range(4)] == [True, True, True, False]
    assert book.admit(Guest(), "b")


def test_the_longest_resting_gives_its_place_to_a_new_one() -> None:
    book = ConnectionBook(3, 3)
    guests = [Guest() for _ in range(3)]
    for guest in guests:
        book.admit(guest, "a")
    book.rest(guests[1])
    book.rest(guests[0])
    assert book.admit(Guest(), "b")
    assert [guest.has_left for guest in guests] == [False, True, False]
    assert book.num_open == 3


def test_a_connection_at_work_keeps_its_place() -> None:
    book = ConnectionBook(1, 1)
    guest = Guest()
    book.admit(guest, "a")
    book.rest(guest)
    book.wake(guest)
    assert not book.admit(Guest(), "b")
    assert not guest.has_left


def test_only_so_many_are_told_why_they_are_turned_away() -> None:
    book = ConnectionBook(1, 1)
    guests = [Guest() for _ in range(MAX_TURNED_AWAY)]
    assert all(book.turn_away(guest) for guest in guests)
    assert not book.turn_away(Guest())
    book.release(guests[0])
    assert book.turn_away(Guest())
    assert book.num_open == 0
