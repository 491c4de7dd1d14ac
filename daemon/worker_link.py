"""Reads every worker's events off the one socket and hands each to whom it concerns."""

import asyncio
import logging
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


async def listen(
    link: DaemonSocket,
    supervisor: Supervisor,
    controller: Controller,
    heartbeat: Heartbeat,
    host: SegmentHost | None = None,
) -> None:
    """For ever. Starting and dying is the supervisor's business, work the controller's, signs of
    life the heartbeat's; workers of instances of another home are the host's."""
    while True:
        try:
            async for sender, event in link.receive():
                if host is not None and host.hosts(sender):
                    host.on_event(sender, event)
                else:
                    _route(sender, event, supervisor, controller, heartbeat)
                # A receive that finds a message does not yield: under load, HTTP would starve.
                await asyncio.sleep(0)
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
