"""The HTTP listener: one socket bound early, uvicorn on it, signals left to the daemon."""

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from daemon.errors import AlreadyRunning, ConfigError

BACKLOG = 2048
STREAM_END_GRACE_S = 5
"""How long open responses may take to write their last bytes at the end."""


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
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error


def url_of(listener: socket.socket) -> str:
    """Where clients reach it; the port is the real one where 0 was asked for."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: `stop` ends it."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=STREAM_END_GRACE_S,
                log_level="warning",
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
