"""How readers let go of the pools of an incarnation that has ended.

A pool in a CPU worker's memory file is gone with whoever holds it last. One in a GPU's memory must
be closed by its readers before a worker starts on that GPU again: until then the memory is not
given back, and freeing what others have open is undefined. Who does not let go in time is
replaced: a process that has ended has nothing open.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from daemon.incarnation import Incarnation
from daemon.introductions import Tell, may_pull
from ipc.messages import PeerDown

logger = logging.getLogger(__name__)

LETTING_GO_S = 10.0


def part(source: Incarnation, peers: Iterable[Incarnation], tell: Tell) -> None:
    """Tell all who may read its pools that it has ended."""
    for peer in peers:
        if may_pull(source.spec, peer.spec):  # its other ranks hear it from their leader
            tell(peer, peer.leader, PeerDown(source.spec.name, source.epoch))


async def until_let_go(
    source: Incarnation,
    peers: Callable[[], Iterable[Incarnation]],
    changed: Callable[[], Awaitable[None]],
) -> None:
    """Wait until nobody has its pools open, if they are in a device's memory.

    Args:
        peers: those that are alive; each one's end is a change.
        changed: waits for the next word or end of any worker.
    """
    if not source.is_on_device:
        return

    async def let_go() -> None:
        while any(peer.may_read(source) for peer in peers()):
            await changed()

    try:
        async with asyncio.timeout(LETTING_GO_S):
            await let_go()
    except TimeoutError:
        for peer in [peer for peer in peers() if peer.may_read(source)]:
            logger.error("%s does not let go of %s: replaced", peer.spec.name, source.spec.name)
            peer.doom(f"it did not let go of the pools of {source.spec.name}")
        await let_go()
