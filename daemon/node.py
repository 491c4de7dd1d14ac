"""What the node as a whole is: its state, its status, its draining. The console's operator."""

import asyncio
import os
import time

from daemon.admin_console import RefusedByState
from daemon.admin_views import (
    BlockCounts,
    EventKind,
    InstanceStatus,
    NodeState,
    Status,
    WorkerStatus,
)
from daemon.controller import Controller
from daemon.errors import Draining, NotReady
from daemon.event_log import EventLog, Notebook
from daemon.incarnation import Incarnation
from daemon.segment_host import SegmentHost
from daemon.supervisor import Supervisor
from daemon.ward import Ward
from ipc.messages import Stats


class Node:
    """Joins controller and supervisor for those who look at the node from outside."""

    def __init__(
        self,
        model_id: str,
        version: str,
        controller: Controller,
        supervisor: Supervisor,
        host: SegmentHost | None = None,
        *,
        events: Notebook | None = None,
    ) -> None:
        self.model_id = model_id
        self.version = version
        self._events = events or EventLog()
        self._controller = controller
        self._supervisor = supervisor
        self._host = host
        self._started_s = time.monotonic()

    @property
    def state(self) -> NodeState:
        if self._controller.is_draining:
            return NodeState.DRAINING
        wards = self._supervisor.wards.values()
        was_whole = all(ward.was_ever_ready for ward in wards)
        if not was_whole and not self._controller.instances.can_serve:
            return NodeState.STARTING
        return NodeState.READY if all(ward.is_ready for ward in wards) else NodeState.DEGRADED

    @property
    def is_helper(self) -> bool:
        """No instance has its home here: this node hosts segments of others' alone."""
        return not self._supervisor.wards

    @property
    def refusal(self) -> NotReady | None:
        """Why nothing can be served now; None when it can."""
        if self._controller.is_draining:
            return Draining()
        if self.is_helper:
            return NotReady(f"this node serves no requests of its own: {self.progress}")
        if not self._controller.instances.can_serve:
            return NotReady(f"not ready to serve: {self.progress}")
        return None

    @property
    def progress(self) -> str:
        """Where each instance is, in one line."""
        if self.is_helper and self._host is not None:
            return self._host.progress
        return ", ".join(f"{w.spec.name} {w.state}" for w in self._supervisor.wards.values())

    def status(self) -> Status:
        return Status(
            state=self.state,
            model=self.model_id,
            version=self.version,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            requests=self._controller.count_phases(),
            instances=tuple(self._instance(ward) for ward in self._supervisor.wards.values()),
        )

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new and wait until nothing is under way.

        Raises:
            TimeoutError: something still is at the deadline; the node stays draining.
        """
        self._controller.is_draining = True
        self._events.note(EventKind.DRAIN_BEGAN, "node", f"within {deadline_s:g} s")
        self._supervisor.on_change()
        async with asyncio.timeout(deadline_s):
            await self._controller.until_idle()
        self._events.note(EventKind.DRAIN_ENDED, "node", "nothing is under way")

    def undrain(self) -> None:
        if not self._controller.is_draining:
            raise RefusedByState("the node is not draining")
        self._controller.is_draining = False
        self._events.note(EventKind.DRAIN_ENDED, "node", "taken back")
        self._supervisor.on_change()

    def _instance(self, ward: Ward) -> InstanceStatus:
        life = ward.life
        known = self._controller.instances.get(ward.spec.name)
        stats = known.stats if known else Stats()
        return InstanceStatus(
            name=ward.spec.name,
            role=ward.spec.role,
            state="draining" if known and known.is_draining else ward.state,
            tp=ward.spec.parallelism.tp,
            pp=ward.spec.parallelism.pp,
            pid=life.workers[life.leader].pid if life and life.workers else None,
            workers=_workers(life) if life else (),
            epoch=life.epoch if life else 0,
            restarts=ward.restarts,
            last_exit=ward.last_exit,
            queue_tokens=known.prefill_load.queued_tokens if known else 0,
            running=stats.num_running,
            waiting=stats.num_waiting,
            blocks=block_counts(stats),
            prefill_steps=stats.prefill_steps,
            decode_steps=stats.decode_steps,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            pulls=stats.num_pulls,
            kernels=life.ready[life.leader].kernels if life and life.is_ready else "",
        )


def block_counts(stats: Stats) -> BlockCounts:
    """A leader's books as consoles see them."""
    return BlockCounts(
        total=stats.blocks_total,
        free=stats.blocks_free,
        held=stats.blocks_held,
        in_use=stats.blocks_in_use,
    )


def _workers(life: Incarnation) -> tuple[WorkerStatus, ...]:
    return tuple(
        WorkerStatus(name.stage, name.tp_rank, process.config.device, process.pid)
        for name, process in life.workers.items()
    )
