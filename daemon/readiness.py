"""Whether the node can take requests, and whether what it has taken gets on.

The first is health: somebody who prefills and somebody who decodes is up, and nothing drains. The
second looks at progress as well: an instance that answers nobody, or has work and takes no step,
is up as a process for as long as the watchdog bears with it. Here it counts for nothing earlier.
"""

from typing import Protocol

from daemon.errors import NotReady
from daemon.instances import InstanceTable
from daemon.node import Node

PATIENCE = 0.5
"""Of the time after which an instance is taken for wedged."""


class Beat(Protocol):
    """By name, for how long an instance has got nowhere; not those that said they would not."""

    still_s: dict[str, float]


class NodeReadiness:
    """What balancers and monitors are told."""

    def __init__(
        self, node: Node, instances: InstanceTable, beat: Beat, wedged_after_s: float
    ) -> None:
        self._node = node
        self._instances = instances
        self._beat = beat
        self._bound_s = PATIENCE * wedged_after_s

    @property
    def refusal(self) -> NotReady | None:
        """Why nothing can be served now."""
        return self._node.refusal

    @property
    def standstill(self) -> NotReady | None:
        """The same; or in which phase nobody gets on."""
        if (refusal := self._node.refusal) is not None:
            return refusal
        still_s = self._beat.still_s
        moving = [i for i in self._instances if still_s.get(i.name, 0.0) < self._bound_s]
        for can, does in (
            (any(i.takes_prompts for i in moving), "prefills"),
            (any(i.takes_handles for i in moving), "decodes"),
        ):
            if not can:
                return NotReady(
                    f"nobody who {does} has made progress for {self._bound_s:g} s and more"
                )
        return None
