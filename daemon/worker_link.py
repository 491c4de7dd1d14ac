"""Reads every worker's events off the one socket and hands each to whom it concerns.

A receive that finds a message does not yield, so everything else on the event loop gets its turn
by the clock. What has come meanwhile is then dealt out together: a daemon that cannot keep up
writes several tokens of a stream at once, and so catches up.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import assert_never

from daemon.controller import Controller
from daemon.heartbeat import Heartbeat
from daemon.segment_host import SegmentHost
from daemon.supervisor import Supervisor
from ipc.messages import (
    Alive,
    Begun,
    Broken,
    Chunked,
    Event,
    Gone,
    Hello,
    Loading,
    Preempted,
    Prefilled,
    Pulled,
    Ready,
    Refused,
    Released,
    Stats,
    Tokens,
)
from ipc.sockets import DaemonSocket, LinkBroken, Sender

logger = logging.getLogger(__name__)

TURN_S = 0.005
"""Flat out, 2 ms give nine tenths of the throughput that 20 give; with a round of the loop for each
message it is a third."""


class Turns:
    """Lets others run when a turn's time is over; whoever comes after a while waits for nobody."""

    def __init__(self, turn_s: float = TURN_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._turn_s = turn_s
        self._clock = clock
        self._ends_s = clock() + turn_s

    async def pass_on(self) -> None:
        """To be called after every piece of work."""
        if self._clock() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = self._clock() + self._turn_s


async def listen(
    link: DaemonSocket,
    supervisor: Supervisor,
    controller: Controller,
    heartbeat: Heartbeat,
    host: SegmentHost | None = None,
) -> None:
    """For ever. Starting and dying is the supervisor's business, work the controller's, signs of
    life the heartbeat's; workers of instances of another home are the host's."""
    turns = Turns()
    while True:
        try:
            async for sender, event in link.receive():
                if host is not None and host.hosts(sender):
                    host.on_event(sender, event)
                else:
                    _route(sender, event, supervisor, controller, heartbeat)
                await turns.pass_on()
        except LinkBroken as error:
            logger.error("%s", error)
            if host is not None and host.hosts(error.sender):
                host.on_broken_link(error.sender, error.reason)
            else:
                supervisor.on_broken_link(*error.sender, error.reason)


def _route(
    sender: Sender,
    event: Event | Tokens,
    supervisor: Supervisor,
    controller: Controller,
    heartbeat: Heartbeat,
) -> None:
    worker, epoch = sender
    match event:
        case Tokens() | Prefilled() | Pulled() | Gone() | Preempted() | Refused():
            controller.on_event(worker.instance, epoch, event)
        case Begun() | Chunked():
            controller.on_event(worker.instance, epoch, event)
        case Stats(beat=beat):
            controller.on_event(worker.instance, epoch, event)
            heartbeat.answered(sender, beat)
        case Alive(beat):
            heartbeat.answered(sender, beat)
        case Hello() | Loading() | Broken() | Ready() | Released():
            supervisor.on_event(worker, epoch, event)
        case _:
            assert_never(event)
