"""Everything that the admin consoles need, put together: doors, operator, events, log levels.

There is always the local door; the one for TCP opens only where an address is configured, and
with keys. It knows the parts of the daemon, and none of them knows it.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from daemon.admin_console import AdminConsole
from daemon.admin_door import Door, KeyDoor, LocalDoor
from daemon.admin_keys import read_admin_keys
from daemon.admin_log_levels import LogLevels
from daemon.admin_orders import NodeOperator, Reach
from daemon.admin_questions import Sights
from daemon.admin_views import EventKind
from daemon.config import DaemonConfig
from daemon.errors import AlreadyRunning, ConfigError
from daemon.event_feed import EventFeed
from daemon.event_log import EventLog
from daemon.heartbeat import Heartbeat
from daemon.node import Node
from daemon.operations import Operations, Parts
from daemon.reload import Reloader
from daemon.slo import SloBook


class Surroundings(msgspec.Struct, frozen=True):
    """The daemon around the consoles. `refused` counts requests by the reason why they were;
    `shut_down` is told how long the drain may take."""

    node: Node
    parts: Parts
    heartbeat: Heartbeat
    slo: SloBook
    refused: Mapping[str, int]
    events: EventLog
    reloader: Reloader
    shut_down: Callable[[float | None], None]


class AdminService:
    """Bound when made, `run` until cancelled.

    Raises:
        ConfigError, AlreadyRunning: the door for TCP cannot be opened.
    """

    def __init__(
        self, context: zmq.asyncio.Context, socket_path: Path, around: Surroundings
    ) -> None:
        parts, events = around.parts, around.events
        self._log_levels = LogLevels()
        self.feed = EventFeed(
            events, parts.supervisor.wards, parts.controller.instances, around.refused
        )
        around.reloader.on_reload.append(
            lambda config: events.note(EventKind.RELOADED, "configuration")
        )
        operator = operator_of(around, self._log_levels)
        doors: list[Door] = [LocalDoor(context, socket_path)]
        if parts.config.admin_address is not None:
            door, directory = _key_door(parts.config, parts.config.admin_address)
            doors.append(door)
            around.reloader.on_reload.append(lambda config: door.admit(read_admin_keys(directory)))
        self._consoles = [AdminConsole(door, operator) for door in doors]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for console in self._consoles:
                tasks.create_task(console.serve())
            tasks.create_task(self.feed.run())

    def close(self) -> None:
        self._log_levels.close()
        for console in self._consoles:
            console.close()


def operator_of(around: Surroundings, log_levels: LogLevels) -> NodeOperator:
    parts = around.parts
    sights = Sights(
        node=around.node,
        timelines=parts.controller.timelines,
        slo=around.slo,
        placement=lambda: parts.configs.placement,
        config=lambda: around.reloader.config,
    )
    reach = Reach(
        node=around.node,
        controller=parts.controller,
        operations=Operations(parts),
        heartbeat=around.heartbeat,
        events=around.events,
        log_levels=log_levels,
        shut_down=around.shut_down,
    )
    return NodeOperator(sights, reach)


def _key_door(config: DaemonConfig, address: str) -> tuple[KeyDoor, Path]:
    """And the directory of its keys."""
    assert config.admin_keys is not None, "checked with the configuration"
    directory = Path(config.admin_keys)
    try:
        return KeyDoor(address, read_admin_keys(directory)), directory
    except zmq.ZMQError as error:
        kind = AlreadyRunning if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(
            f"admin_address {address} cannot be listened on: {zmq.strerror(error.errno or 0)}"
        ) from error
