"""How somebody who cannot open a pool's memory asks its owner for parts of it.

A pool's descriptor is one end of a socket pair whose other end its owner keeps. In it lies a
document that says how to open the pool, for everybody who has a copy of the descriptor: it is
looked at and left there. Who cannot open the pool sends a socket of its own and a memory file
through. From then on the two speak alone: the one asks for the file's slots to be filled, the
other says which is. Either one's end ends it. Nothing has a name; knows nothing of CUDA.
"""

import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress

from ipc.kv_shm import PoolUnavailable

MAX_RUNS = 2048
"""Of one asking, so that it is one message: 16 bytes each."""

_MAX_BYTES = 16 * (MAX_RUNS + 1)
_MAX_DOCUMENT_BYTES = 4096
_HELLO = b"slots"


class OwnerGone(Exception):
    """The pool's owner has ended, and what was in it is lost."""


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
        PoolUnavailable: that is no door, or nobody has opened it for long.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(fileno=descriptor) as door, theirs:
        try:
            # Not `send_fds`, which drops its flags.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno(), memory]))
            door.sendmsg([_HELLO], [rights], socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError) as error:
            ours.close()
            raise OwnerGone("the pool's owner has ended") from error
        except OSError as error:
            ours.close()
            raise PoolUnavailable(f"the pool's owner cannot be asked: {error}") from error
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
        """
        try:
            self._socket.sendall(pack_asking(slot, runs))
        except OSError as error:
            raise OwnerGone("the pool's owner has ended") from error

    def await_filled(self) -> int:
        """The slot that is full: each that was asked for, in their order. Raises as `ask` does."""
        try:
            answer = self._socket.recv(8)
        except OSError as error:
            raise OwnerGone("the pool's owner has ended") from error
        if not answer:
            raise OwnerGone("the pool's owner has ended")
        return int.from_bytes(answer, "little")

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
        guest.send(slot.to_bytes(8, "little"), socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True
