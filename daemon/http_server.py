"""The HTTP listener: one socket bound early, uvicorn on it, signals left to the daemon."""

import asyncio
import contextlib
import errno
import functools
import resource
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from daemon.accept_log import AcceptLog
from daemon.config import DaemonConfig
from daemon.connection_book import ConnectionBook
from daemon.errors import AlreadyRunning, ConfigError
from daemon.exposure import check_exposure
from daemon.guarded_protocol import GuardedProtocol, Guards

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
"""Connections that are taken in one go: some milliseconds, so that a crowd stops no stream."""
IDLE_S = 75
"""How long a connection may rest between requests: longer than proxies keep theirs (60 s)."""
STREAM_END_GRACE_S = 5
"""How long open responses may take to write their last bytes at the end."""
MAX_DESCRIPTORS = 65_536
RESERVED_DESCRIPTORS = 256
"""For all that is no connection: sockets and pools of workers, links, files."""
MAX_CONNECTIONS = 16_384


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything is spawned.

    Raises:
        AlreadyRunning: somebody has it.
        ConfigError: it cannot be had for another reason.
    """
    # By name of the protocol: asyncio turns Nagle's delay off only on sockets that say TCP.
    listener = socket.socket(_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AlreadyRunning(f"{host}:{port} is in use; choose another --port") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def check_listener(listener: socket.socket, config: DaemonConfig) -> None:
    """Raises ConfigError: it is open to others, and nobody is asked for a key."""
    host = listener.getsockname()[0]
    check_exposure(host, has_keys=config.api_keys is not None, is_insecure=config.insecure)


def url_of(listener: socket.socket) -> str:
    """Where clients reach it; the port is the real one where 0 was asked for."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_descriptor_limit() -> int:
    """Use what the system allows us; many shells and services start with 1,024. The new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)


def book_of(max_connections: int | None, max_per_peer: int | None) -> ConnectionBook:
    """As many connections as configured, else as many as there are descriptors to spare.

    One peer gets three quarters of them: it may be a proxy with everybody behind it, but must not
    lock all others out, those that ask for health among them.

    Raises:
        ConfigError: there are not as many descriptors as configured connections need.
    """
    most = raise_descriptor_limit() - RESERVED_DESCRIPTORS
    if max_connections is not None and max_connections > most:
        raise ConfigError(
            f"max_connections is {max_connections}, but the limit on open files leaves "
            f"{max(most, 0)}; raise it (ulimit -n, LimitNOFILE)"
        )
    total = max_connections or max(16, min(most, MAX_CONNECTIONS))
    return ConnectionBook(total, max_per_peer or max(1, total * 3 // 4))


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, behind guards: `stop` ends it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        book: ConnectionBook | None = None,
        guards: Guards | None = None,
        idle_s: int = IDLE_S,
    ) -> None:
        self.book = book or book_of(None, None)
        self.num_rounds = 0
        protocol = functools.partial(GuardedProtocol, guards=guards or Guards(), book=self.book)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("Any", protocol),  # called like the class that it is made of
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=idle_s,
                timeout_graceful_shutdown=STREAM_END_GRACE_S,
                log_level="warning",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio has one number for the kernel's queue and for what it accepts in one go."""
        asyncio.get_running_loop().set_exception_handler(AcceptLog())
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's own round, ten times a second while it serves."""
        self.num_rounds += 1
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
