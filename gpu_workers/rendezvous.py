"""Where the ranks of an instance leave each other their addresses.

The URL names a file (`file:///...`) where all of the instance is on one node, or a TCP port of
the leader (`tcp://host:port`). It is fresh with every incarnation, and nothing here is global.
"""

import socket
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch.distributed

from ipc.sharding import Shard

LOOPBACK = "127.0.0.1"

# Public names of torch whose types it does not export.
distributed: Any = torch.distributed


class MeetingPoint(NamedTuple):
    """Where addresses are exchanged, and our own address as the others see it."""

    store: Any
    address: str


def meet_at(url: str, shard: Shard, timeout: timedelta) -> MeetingPoint:
    """Open it, and if we are the first rank, make it.

    Raises:
        RuntimeError, OSError: the leader's port cannot be reached in time.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        store = distributed.FileStore(parts.path, shard.parallelism.num_workers)
        store.set_timeout(timeout)
        return MeetingPoint(store, LOOPBACK)
    assert parts.hostname is not None
    assert parts.port is not None
    is_home = shard.stage == 0 and shard.tp_rank == 0
    store = distributed.TCPStore(
        parts.hostname, parts.port, is_master=is_home, timeout=timeout, wait_for_workers=False
    )
    return MeetingPoint(store, _address_facing(parts.hostname))


def _address_facing(host: str) -> str:
    """Our own address on the way to a host; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
