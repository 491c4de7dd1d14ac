"""A datagram socket in the service manager's place."""

import asyncio
import socket


class FakeManager:
    """A NOTIFY_SOCKET and what arrived at it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def received(self) -> list[list[str]]:
        """One list of lines per datagram."""
        datagrams = []
        while True:
            try:
                datagrams.append(self.socket.recv(65536).decode().split("\n"))
            except BlockingIOError:
                return datagrams

    async def next(self) -> list[str]:
        """The lines of the next datagram."""
        datagram = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
        return datagram.decode().split("\n")

    def fill(self) -> int:
        """Stuff the queue until it takes no more; the number of datagrams in it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            other.connect(self.address)
            count = 0
            while True:
                try:
                    other.send(b"STATUS=filler")
                except BlockingIOError:
                    return count
                count += 1
