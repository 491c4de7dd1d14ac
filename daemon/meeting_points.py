"""Where the workers of one instance meet: names that are fresh with every epoch.

The leader's plans come by a socket, the ranks find each other's collectives by a store. On one
node both are names in the run directory; they bear digits of the epoch, so that nobody meets a
dead one's group, and are as short as the daemon's own socket's: a run directory that holds that
one holds these. Across nodes they are ports of the home, and plans are encrypted.
"""

import socket
from pathlib import Path

import msgspec

from daemon.errors import ConfigError
from ipc.curve import CurveKeys, new_keys
from ipc.vocabulary import InstanceSpec

_DIGITS = 10
_PLANS, _COLLECTIVES = "g", "r"
_NO_KEYS = CurveKeys("", "")


class Meeting(msgspec.Struct, frozen=True):
    """Of one epoch: ZeroMQ address of the leader's plans, URL of the collectives' rendezvous.

    `keys` are for plans that cross nodes: the secret is the leader's.
    """

    plans: str = ""
    collectives: str = ""
    keys: CurveKeys = _NO_KEYS


class MeetingPoints:
    """Those of all groups: in one run directory, which is ours alone, or at our address."""

    def __init__(self, directory: Path, host: str | None = None) -> None:
        self._directory = directory
        self._host = host
        self._across: dict[int, Meeting] = {}

    def of(self, spec: InstanceSpec, epoch: int) -> Meeting:
        """The same for all workers of an epoch; a worker alone meets nobody."""
        if spec.parallelism.num_workers == 1:
            return Meeting()
        if any(segment.node != spec.home for segment in spec.segments):
            return self._across.setdefault(epoch, self._ports())
        return Meeting(self.plans(epoch), self.collectives(epoch))

    def plans(self, epoch: int) -> str:
        """ZeroMQ address of the leader's step plans, within the node."""
        return f"ipc://{self._path(_PLANS, epoch)}"

    def collectives(self, epoch: int) -> str:
        """URL of the collectives' rendezvous, within the node."""
        path = self._path(_COLLECTIVES, epoch).absolute()
        if set("#?;") & set(str(path)):
            raise ConfigError(
                f"run directory {self._directory}: workers that compute together cannot meet in a "
                "path with #, ? or ;"
            )
        return f"file://{path}"

    def remove(self, epoch: int) -> None:
        """That epoch is over. Idempotent."""
        self._across.pop(epoch, None)
        self._path(_PLANS, epoch).unlink(missing_ok=True)
        self._path(_COLLECTIVES, epoch).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a dead daemon's instances left."""
        for kind in (_PLANS, _COLLECTIVES):
            for leftover in self._directory.glob(kind + "[0-9a-f]" * _DIGITS):
                leftover.unlink(missing_ok=True)

    def _ports(self) -> Meeting:
        """Free ones of our address. Should another program be quicker than the leader, that one
        cannot listen, and the next epoch has other ports."""
        assert self._host is not None, "an instance on several nodes, and we have no address"
        plans, collectives = _free_ports(self._host)
        return Meeting(
            f"tcp://{self._host}:{plans}", f"tcp://{self._host}:{collectives}", new_keys()
        )

    def _path(self, kind: str, epoch: int) -> Path:
        return self._directory / f"{kind}{epoch % 16**_DIGITS:0{_DIGITS}x}"


def _free_ports(host: str) -> tuple[int, int]:
    """Two at once, so that they differ."""
    with socket.create_server((host, 0)) as one, socket.create_server((host, 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]
