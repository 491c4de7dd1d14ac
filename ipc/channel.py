"""The Unix socket pair a worker inherits: its configuration, memory descriptors, and its leash.

ZeroMQ cannot carry file descriptors, so they travel here (SCM_RIGHTS), each behind a message that
says whose pool it is. The pair has no name: it ends with its two holders, and its end of file
tells a worker that the daemon has died.
"""

import socket

import msgspec
import orjson

from ipc.messages import WorkerConfig
from ipc.vocabulary import WorkerName

_MAX_BYTES = 1 << 16


class PoolDescriptor(msgspec.Struct, frozen=True, tag=True):
    """Precedes a memory file descriptor: whose pool it is, and of which incarnation."""

    worker: WorkerName
    epoch: int


class ChannelClosed(Exception):
    """The other end is gone."""


def make_pair() -> tuple[socket.socket, socket.socket]:
    """(daemon's end, worker's end), keeping message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_config(channel: socket.socket, config: WorkerConfig) -> None:
    """Raises ChannelClosed."""
    try:
        channel.sendall(orjson.dumps(msgspec.to_builtins(config)))
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive_config(channel: socket.socket) -> WorkerConfig:
    """Raises ChannelClosed."""
    return msgspec.convert(orjson.loads(_receive(channel)[0]), WorkerConfig)


def send_descriptor(channel: socket.socket, about: PoolDescriptor, descriptor: int) -> None:
    """Give the other end a copy of the descriptor; ours stays open.

    Raises:
        ChannelClosed: the other end is gone.
    """
    try:
        socket.send_fds(channel, [orjson.dumps(msgspec.to_builtins(about))], [descriptor])
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive_descriptor(channel: socket.socket) -> tuple[PoolDescriptor, int]:
    """Raises ChannelClosed."""
    payload, descriptors = _receive(channel)
    return msgspec.convert(orjson.loads(payload), PoolDescriptor), descriptors[0]


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    try:
        payload, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 1)
    except OSError as error:  # a peer that died may reset the pair before it is read empty
        raise ChannelClosed(str(error)) from error
    if not payload:
        raise ChannelClosed("the other end of the channel is closed")
    return payload, descriptors
