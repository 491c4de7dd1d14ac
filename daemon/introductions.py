"""Who gets to know whose KV pools: the ranks that may pull, of the pools that overlap theirs.

An instance that decodes pulls out of prefill instances; a mixed one keeps what it prefills. Each
rank copies its own layers and heads, so it is told of the ranks that hold some of them. They are
on one node: what would pull across nodes is refused before it is spawned.
"""

from collections.abc import Callable

from daemon.incarnation import Incarnation
from ipc.channel import PoolDescriptor
from ipc.kv_layout import LayoutMismatch, RankLayout, check_same_blocks
from ipc.messages import Command, PeerUp
from ipc.vocabulary import InstanceSpec, Role, WorkerName

Tell = Callable[[Incarnation, WorkerName, Command], None]


def may_pull(source: InstanceSpec, reader: InstanceSpec) -> bool:
    """Whether blocks of the one may ever be read by the other."""
    return source.role is Role.PREFILL and reader.role.decodes and source.first_gap(reader) is None


def mismatch(life: Incarnation, peer: Incarnation) -> str | None:
    """Why blocks cannot be copied between two instances that are to do so; None if they can."""
    for source, reader in ((life, peer), (peer, life)):
        if not may_pull(source.spec, reader.spec):
            continue
        try:
            check_same_blocks(_leader_layout(reader), _leader_layout(source))
        except LayoutMismatch as error:
            return f"{reader.spec.name} cannot pull from {source.spec.name}: {error}"
    return None


def introduce(source: Incarnation, reader: Incarnation, tell: Tell) -> None:
    """Give each rank of `reader` a descriptor of every pool that it may have to read."""
    if not may_pull(source.spec, reader.spec):
        return
    for pool, process in source.workers.items():
        about = PoolDescriptor(pool, source.epoch)
        peer_up = PeerUp(pool, source.epoch, source.ready[pool].layout)
        for name, target in reader.workers.items():
            if _overlap(reader.ready[name].layout, peer_up.layout):
                assert source.spec.node_of(pool) == reader.spec.node_of(name)
                reader.lend(name, source.spec.name, source.epoch)
                target.give_pool(about, process.pool_descriptor)
                tell(reader, name, peer_up)


def _overlap(destination: RankLayout, source: RankLayout) -> bool:
    layers = destination.layers.meet(source.layers)
    return layers is not None and destination.heads.meet(source.heads) is not None


def _leader_layout(life: Incarnation) -> RankLayout:
    return life.ready[life.leader].layout
