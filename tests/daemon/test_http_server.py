"""The listener: bound early, named by its real port, without Nagle's delay."""

import asyncio
import resource
import socket

import pytest

from daemon import http_server
from daemon.config import DaemonConfig, read_config
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


def test_the_real_port_is_told_where_any_was_asked_for_C10() -> None:
    with http_server.bind("127.0.0.1", 0) as listener:
        assert http_server.url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_socket_that_others_can_reach_is_refused_without_keys_whoever_bound_it() -> None:
    """Its address counts, not the configured one: a service manager may have passed it."""
    with http_server.bind("0.0.0.0", 0) as listener:
        with pytest.raises(ConfigError, match=r"host: 0\.0\.0\.0 can be reached from other"):
            http_server.check_listener(listener, DaemonConfig())
        http_server.check_listener(listener, DaemonConfig(api_keys="keys.toml"))
        http_server.check_listener(listener, DaemonConfig(insecure=True))
    with http_server.bind("127.0.0.1", 0) as listener:
        http_server.check_listener(listener, DaemonConfig())


def test_the_limit_on_open_files_is_raised_as_far_as_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(512, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        limit = http_server.raise_descriptor_limit()
        assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert limit == min(hard, http_server.MAX_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_without_descriptors_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="max_connections is 1000000000, but the limit on open"):
        http_server.book_of(10**9, None)


@pytest.mark.parametrize(("per_peer", "admitted"), [(None, 6), (2, 2), (8, 8)])
def test_one_peer_may_have_three_quarters_of_the_connections_or_as_configured(
    per_peer: int | None, admitted: int
) -> None:
    book = http_server.book_of(8, per_peer)
    assert sum(book.admit(NoConnection(), "peer") for _ in range(10)) == admitted


class NoConnection:
    """Takes a place."""

    def leave(self) -> None: ...


@pytest.mark.parametrize("origins", [["https://a.example", "http://localhost:3000"], ["*"]])
def test_origins_are_configured(origins: list[str]) -> None:
    assert read_config(None, {"cors_origins": origins}).cors_origins == tuple(origins)


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://a b", "", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins: .* is none; an origin is"):
        read_config(None, {"cors_origins": [origin]})
