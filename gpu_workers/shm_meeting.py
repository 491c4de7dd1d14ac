"""How the ranks of a stage come by memory that all of them can map.

The memory is an anonymous file, and travels over Unix sockets whose abstract name the first rank
leaves in the ranks' store: nothing here has a name that could be left behind or that another
user could take over. The sockets stay open, so that everybody sees when a rank ends. Ranks that
cannot all share memory agree that none of them does.
"""

import os
import socket
import struct
import time
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from ipc import kv_shm

NOBODY = b"-"
CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED tells them


class Store(Protocol):
    """Where ranks leave words for each other; `get` waits until one is there, bounded."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...


class Shared(NamedTuple):
    """The memory, and connections that end with the ranks that hold the other end."""

    descriptor: int
    connections: list[socket.socket]


class Ranks(NamedTuple):
    """What the ranks of a stage have: the same answer for all of them."""

    unable: list[int]  # to share memory
    num_cores: int  # of all of them together

    @classmethod
    def ask(cls, store: Store, rank: int, size: int, *, can_share: bool) -> "Ranks":
        cores = sorted(os.sched_getaffinity(0))
        store.set(f"rank-{rank}", ",".join(map(str, cores)).encode() if can_share else NOBODY)
        told = [store.get(f"rank-{other}") for other in range(size)]
        return cls(
            unable=[other for other, cores in enumerate(told) if cores == NOBODY],
            num_cores=len(set(b",".join(told).split(b","))),
        )


def offer(store: Store, num_others: int, num_bytes: int, timeout_s: float) -> Shared:
    """The first rank's part: make the memory and hand it to all others.

    Raises:
        PoolUnavailable: there is no memory, which the others know by then.
        OSError: the others did not come.
    """
    try:
        descriptor = kv_shm.create(num_bytes, "sums")
    except kv_shm.PoolUnavailable:
        store.set("memory", NOBODY)
        raise
    with ExitStack() as undo, _socket() as listener:
        undo.callback(os.close, descriptor)
        listener.bind(b"")  # the kernel finds a free abstract name
        listener.listen(num_others)
        store.set("memory", listener.getsockname())
        deadline_s = time.monotonic() + timeout_s
        connections = [_guest(listener, deadline_s) for _ in range(num_others)]
        for connection in connections:
            undo.callback(connection.close)
        for connection in connections:
            socket.send_fds(connection, [b"memory"], [descriptor])
        undo.pop_all()
    return Shared(descriptor, connections)


def take(store: Store, timeout_s: float) -> Shared | None:
    """The other ranks' part; None where the first one has no memory to share.

    Raises:
        OSError: the first rank is gone, or somebody else answers in its place.
    """
    address = store.get("memory")
    if address == NOBODY:
        return None
    with ExitStack() as undo:
        connection = undo.enter_context(_socket())
        connection.settimeout(timeout_s)
        connection.connect(address)
        if not _is_ours(connection):
            raise PermissionError("another user answers in the first rank's place")
        _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
        if not descriptors:
            raise ConnectionError("the first rank has left")
        undo.pop_all()
    return Shared(descriptors[0], [connection])


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _guest(listener: socket.socket, deadline_s: float) -> socket.socket:
    """The next one who is of our own user; others are turned away."""
    while True:
        listener.settimeout(max(1e-3, deadline_s - time.monotonic()))
        connection, _ = listener.accept()
        if _is_ours(connection):
            return connection
        connection.close()


def _is_ours(connection: socket.socket) -> bool:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
