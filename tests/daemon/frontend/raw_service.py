"""The daemon's real HTTP server in a thread of its own, for clients that block."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from daemon import http_server
from daemon.connection_book import ConnectionBook
from daemon.frontend.bodies import Limits
from daemon.guarded_protocol import Guards
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import REPLY
from tests.daemon.frontend.http_service import Service

GIVEN_UP_S = 30.0
"""When a client of a server with deadlines of parts of a second calls it hung."""
LAST = b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class RawService:
    """Where it listens, and what it is made of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        limits = Limits(max_body_bytes=100_000, body_s=0.2, min_body_bytes_per_s=1_000_000)
        self.listener = http_server.bind("127.0.0.1", 0)
        self.book = ConnectionBook(1000, 1000)
        self.server = http_server.HttpServer(
            Service(tokenizer, reply=REPLY, limits=limits).app,
            book=self.book,
            guards=Guards(head_s=0.2, linger_s=0.1),
            idle_s=1,
        )

    @contextmanager
    def running(self) -> Iterator["RawService"]:
        serving = self.server.serve(sockets=[self.listener])
        thread = threading.Thread(target=asyncio.run, args=(serving,))
        thread.start()
        try:
            yield self
        finally:
            self.server.stop()
            thread.join()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=GIVEN_UP_S)

    def answers(self, pieces: Sequence[bytes]) -> bytes:
        """All that comes back on a connection that sends these, until the server closes it."""
        with self.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for piece in pieces:
                    connection.sendall(piece)
                return _all_of(connection)
            except ConnectionError:
                return b""

    def is_well(self) -> bool:
        """Whether a good request is answered."""
        return statuses(self.answers([LAST])) == [200]


def statuses(data: bytes) -> list[int]:
    """Of all responses in what was received."""
    return [int(found[1]) for found in _STATUS.finditer(data)]


def _all_of(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(65536):
        received += data
    return bytes(received)
