"""One instance as its supervisor keeps it."""

import asyncio

from daemon.incarnation import Incarnation
from ipc.vocabulary import InstanceSpec, WorkerName


class Ward:
    """One instance as its supervisor sees it: the present life and the record of earlier ones."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.life: Incarnation | None = None
        self.restarts = 0
        self.last_exit: str | None = None
        self.was_ever_ready = False
        self.waits_for: str | None = None
        self.culprit: str | None = None  # the device of the last worker that ended it
        self.quarantined: str | None = None  # why it is not started again
        self.is_replaced = False  # its present life ends on purpose: no fault, and no wait after it
        self.cut_short = asyncio.Event()  # it is not to wait for its next life any longer
        self.is_leaving = False  # and there is to be no next one

    @property
    def state(self) -> str:
        if self.life is None:
            return self.quarantined or self.waits_for or "restarting"
        if self.is_leaving:
            return "leaving"
        return self.life.progress

    def device_of(self, name: WorkerName) -> str:
        """For people and for the record: on which node, and which one there."""
        segment = self.spec.segments[name.stage]
        return f"{segment.node}:{segment.devices[name.tp_rank]}"

    @property
    def is_ready(self) -> bool:
        return self.life is not None and self.life.is_up
