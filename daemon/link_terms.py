"""What the daemons at both ends of a link must agree on before one spawns for the other.

Digests stand for the things themselves: the placement's instances, so that both mean the same
devices, and the model's `config.json`, so that both cut the same layers.
"""

import hashlib

import msgspec
import orjson

from daemon.config import DaemonConfig
from daemon.node_messages import LINK_VERSION, Join
from ipc.vocabulary import Placement


class Terms(msgspec.Struct, frozen=True):
    """Of one node; see `objection` for what each is."""

    placement: str
    model: str

    def join(self, home: str, silence_s: float) -> Join:
        return Join(
            version=LINK_VERSION,
            home=home,
            silence_s=silence_s,
            placement=self.placement,
            model=self.model,
        )

    def objection(self, join: Join) -> str | None:
        """Why such a home cannot have workers here."""
        if join.version != LINK_VERSION:
            return f"{join.home} speaks version {join.version} of the link, not {LINK_VERSION}"
        if join.placement != self.placement:
            return f"{join.home} has another placement file"
        if join.model != self.model:
            return f"the model of {join.home} has another config.json"
        return None


def terms_of(config: DaemonConfig, placement: Placement) -> Terms:
    return Terms(
        placement=_digest(orjson.dumps(msgspec.to_builtins(placement.instances))),
        model=_digest((config.model_dir / "config.json").read_bytes()),
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
