"""Where the workers of one instance meet: names in the run directory, fresh with every epoch.

The leader's plans come by a socket, the ranks find each other's collectives by a file. Names bear
digits of the epoch, so that nobody meets a dead one's group, and are as short as the daemon's own
socket's: a run directory that holds that one holds these.
"""

from pathlib import Path

from daemon.errors import ConfigError

_DIGITS = 10
_PLANS, _COLLECTIVES = "g", "r"


class MeetingPoints:
    """The names of all groups in one run directory, which is ours alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def plans(self, epoch: int) -> str:
        """ZeroMQ address of the leader's step plans."""
        return f"ipc://{self._path(_PLANS, epoch)}"

    def collectives(self, epoch: int) -> str:
        """URL of the collectives' rendezvous."""
        path = self._path(_COLLECTIVES, epoch).absolute()
        if set("#?;") & set(str(path)):
            raise ConfigError(
                f"run directory {self._directory}: workers that compute together cannot meet in a "
                "path with #, ? or ;"
            )
        return f"file://{path}"

    def remove(self, epoch: int) -> None:
        """That epoch is over. Idempotent."""
        self._path(_PLANS, epoch).unlink(missing_ok=True)
        self._path(_COLLECTIVES, epoch).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a dead daemon's instances left."""
        for kind in (_PLANS, _COLLECTIVES):
            for leftover in self._directory.glob(kind + "[0-9a-f]" * _DIGITS):
                leftover.unlink(missing_ok=True)

    def _path(self, kind: str, epoch: int) -> Path:
        return self._directory / f"{kind}{epoch % 16**_DIGITS:0{_DIGITS}x}"
