"""How somebody who cannot open a pool's memory asks its owner for parts of it.

A pool's descriptor is one end of a socket pair whose other end its owner keeps. In it lies a
document that says how to open the pool, for everybody who has a copy of the descriptor: it is
looked at and left there. Who cannot open the pool sends a socket of its own and a memory file
through. From then on the two speak alone: the one asks for the file's slots to be filled, the
other says which is, or why it serves the one no more. Either one's end ends it. Nothing has a
name; knows nothing of CUDA.
"""

import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress

MAX_RUNS = 2048
"""Of one asking, so that it is one message: 16 bytes each."""

_MAX_BYTES = 16 * (MAX_RUNS + 1)
_MAX_DOCUMENT_BYTES = 4096
_HELLO = b"slots"
_FAREWELL = b"sent away: "  # longer than the number of a slot
_MAX_FAREWELL_BYTES = 1024
_SLOT_BYTES = 8
_ENDED = "the pool's owner has ended"


class Unanswered(Exception):
    """What is asked of a pool's owner does not come, this time; says why."""


class OwnerGone(Unanswered):
    """It has ended, or we have parted from it: nothing will ever come."""


class NoAsking(ValueError):
    """What came is not what an importer sends."""


def make_door(document: bytes) -> tuple[socket.socket, int]:
    """(the owner's end, the descriptor that is given to others)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.sendall(document)
    return ours, theirs.detach()


def read_document(descriptor: int) -> bytes:
    """What `make_door` put there, also after its owner's end. Raises OSError: it is no door."""
    with socket.socket(fileno=descriptor) as door:
        try:
            return door.recv(_MAX_DOCUMENT_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        finally:
            door.detach()


def knock(descriptor: int, memory: int) -> "Line":
    """Begin to speak with the owner, who is to put what we ask for into the memory file.

    Raises:
        OwnerGone: it has ended.
        Unanswered: nobody has opened the door for long. That may change.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(fileno=descriptor) as door, theirs:
        try:
            # Not `send_fds`, which drops its flags.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno(), memory]))
            door.sendmsg([_HELLO], [rights], socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError) as error:
            ours.close()
            raise OwnerGone(_ENDED) from error
        except OSError as error:
            ours.close()
            raise Unanswered(f"the pool's owner cannot be asked: {error.strerror}") from error
        finally:
            door.detach()
    return Line(ours)


def open_door(door: socket.socket) -> tuple[socket.socket, int] | None:
    """The owner's answer to a knock: (whom to speak to, the memory file). None: nobody can knock
    any more."""
    try:
        hello, descriptors, _, _ = socket.recv_fds(door, len(_HELLO), 2)
    except ConnectionError:  # the last descriptor was closed, with the document in it
        return None
    if not hello:
        return None
    guest, memory = descriptors
    return socket.socket(fileno=guest), memory


class Line:
    """The importer's end."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours

    def ask(self, slot: int, runs: Sequence[tuple[int, int]]) -> None:
        """Have a slot filled with these (offset in the pool, bytes), one after the other.

        Raises:
            OwnerGone: it has ended, or `cut` was called.
            Unanswered: it has sent us away. After either, nothing more comes of this line.
        """
        try:
            self._socket.sendall(pack_asking(slot, runs))
        except OSError as error:
            raise self._last_words() from error

    def await_filled(self) -> int:
        """The slot that is full: each that was asked for, in their order. Raises as `ask` does."""
        try:
            answer = self._socket.recv(_MAX_FAREWELL_BYTES)
        except OSError as error:
            raise self._last_words() from error
        if len(answer) != _SLOT_BYTES:
            raise _parting(answer)
        return int.from_bytes(answer, "little")

    def _last_words(self) -> Unanswered:
        """What it has said before it left: after slots that nobody waits for any more, if it
        filled some."""
        with suppress(OSError):
            while answer := self._socket.recv(_MAX_FAREWELL_BYTES, socket.MSG_DONTWAIT):
                if len(answer) != _SLOT_BYTES:
                    return _parting(answer)
        return OwnerGone(_ENDED)

    def cut(self) -> None:
        """End whatever waits here, on any thread; idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def pack_asking(slot: int, runs: Sequence[tuple[int, int]]) -> bytes:
    """One message."""
    assert len(runs) <= MAX_RUNS
    numbers = array("Q", [slot, 0])
    for run in runs:
        numbers.extend(run)
    return numbers.tobytes()


def read_asking(guest: socket.socket) -> tuple[int, list[tuple[int, int]]] | None:
    """The owner's side of `Line.ask`; None: the importer has left.

    Raises:
        NoAsking: it is something else.
    """
    try:
        message = guest.recv(_MAX_BYTES)
    except ConnectionError:
        return None
    return parse_asking(message) if message else None


def parse_asking(message: bytes) -> tuple[int, list[tuple[int, int]]]:
    """The mirror of `pack_asking`. Raises NoAsking."""
    if not message or len(message) % 16 or len(message) > _MAX_BYTES:
        raise NoAsking(f"{len(message)} bytes are no list of runs")
    numbers = array("Q", message)
    return numbers[0], list(zip(numbers[2::2], numbers[3::2], strict=True))


def say_filled(guest: socket.socket, slot: int) -> bool:
    """Whether the importer could be told: it has left, or reads nothing, if not."""
    try:
        guest.send(slot.to_bytes(_SLOT_BYTES, "little"), socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def send_away(guest: socket.socket, reason: str) -> None:
    """Tell an importer, if it still listens, why it is served no more, and part from it."""
    with suppress(OSError), guest:
        guest.send((_FAREWELL + reason.encode())[:_MAX_FAREWELL_BYTES], socket.MSG_DONTWAIT)


def _parting(answer: bytes) -> Unanswered:
    """What an answer says that is not a slot's number."""
    if not answer.startswith(_FAREWELL):
        return OwnerGone(_ENDED)
    reason = answer.removeprefix(_FAREWELL).decode(errors="replace")
    return Unanswered(f"the pool's owner serves us no more: {reason}")
