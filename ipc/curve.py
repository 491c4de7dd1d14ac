"""CURVE keys: sockets that leave a machine are encrypted, and open to those who hold them alone.

The link between daemons has one pair for all nodes: whoever holds its secret is one of them, at
either end, and each end makes sure of the other. A group's plan bus has a pair of its own, as
fresh as its epoch, whose public half is told over that link only: CURVE lets nobody in who does
not know it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"nodes"


class CurveKeys(msgspec.Struct, frozen=True):
    """A pair, in Z85: 40 printable characters each."""

    public: str
    secret: str

    def __repr__(self) -> str:
        """Without the secret: it must not get into a log."""
        return f"CurveKeys({self.public})"


def new_keys() -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def listen_with(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Before `bind`: let in who knows the public key."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def ask_at_the_door(socket: zmq.Socket[Any]) -> None:
    """Before `bind`: let in whom the context's doorkeeper admits; without one, nobody."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def call_with(socket: zmq.Socket[Any], server: str, own: CurveKeys) -> None:
    """Before `connect`: to the holder of the secret of `server`, as the holder of `own`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())


def door_answer(request: Sequence[bytes], keys: CurveKeys) -> list[bytes]:
    """A doorkeeper's answer to one question of ZeroMQ's (ZAP, RFC 27): in comes who has `keys`."""
    version, request_id, _, _, _, mechanism, *credentials = request
    is_ours = mechanism == b"CURVE" and credentials == [z85.decode(keys.public)]
    status, text = (b"200", b"OK") if is_ours else (b"400", b"not a key of this cluster")
    return [version, request_id, status, text, b"", b""]
