"""The listener: bound early, named by its real port, without Nagle's delay."""

import asyncio
import socket

import pytest

from daemon import http_server
from daemon.errors import AlreadyRunning, ConfigError


async def test_small_writes_are_not_held_back() -> None:
    """asyncio turns Nagle's algorithm off only on sockets that were made as TCP by name."""
    with http_server.bind("127.0.0.1", 0) as listener:
        delays: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            delays.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await delays != 0
            writer.close()


def test_a_port_that_is_taken_is_named() -> None:
    with http_server.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AlreadyRunning, match=f"127.0.0.1:{port} is in use"):
            http_server.bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 203"):
        http_server.bind("203.0.113.1", 0)


def test_the_real_port_is_told_where_any_was_asked_for() -> None:
    with http_server.bind("127.0.0.1", 0) as listener:
        assert http_server.url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
