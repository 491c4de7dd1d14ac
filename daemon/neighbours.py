"""The nodes that host segments of our instances: all of our links to them, by name."""

import asyncio
from collections.abc import Iterable

from daemon.remote_node import RemoteNode
from ipc.vocabulary import InstanceSpec


class Neighbours:
    """Of one home; none where all of its instances are whole on their home."""

    def __init__(self, nodes: Iterable[RemoteNode] = ()) -> None:
        self._nodes = {node.name: node for node in nodes}

    def __getitem__(self, name: str) -> RemoteNode:
        return self._nodes[name]

    async def run(self) -> None:
        """Keep all links until cancelled."""
        async with asyncio.TaskGroup() as links:
            for node in self._nodes.values():
                links.create_task(node.run())

    async def until_joined(self, spec: InstanceSpec) -> None:
        """Until all nodes of an instance are there at once."""
        while missing := self._missing(spec):
            await missing[0].until_joined()

    def trouble(self, spec: InstanceSpec) -> str | None:
        """Why an instance cannot be started at the moment, for people."""
        return (
            "; ".join(f"{n.name} is not joined: {n.trouble}" for n in self._missing(spec)) or None
        )

    def _missing(self, spec: InstanceSpec) -> list[RemoteNode]:
        others = {segment.node for segment in spec.segments} - {spec.home}
        nodes = [self._nodes[name] for name in sorted(others)]
        return [node for node in nodes if not node.is_joined]
