"""The other process of pulls that are checked or timed: has pools, fills them, overwrites them.

It is spoken to over an inherited socket, one message a line of JSON, and ends with it.
"""

import argparse
import functools
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self

import msgspec
import orjson
import torch

from gpu_workers import lifeline
from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.kv_exchange import KVExchange, OwnExchange
from ipc import channel
from ipc.channel import PoolDescriptor
from ipc.kv_layout import RankLayout
from ipc.vocabulary import WorkerName

OWNER = "exporter"
DONE = b"done"
PATIENCE_S = 60.0
_MAX_BYTES = 1 << 16


class Make(msgspec.Struct, frozen=True, tag=True):
    """Have pools of those layouts, and no others any more; give their handles. What is asked later
    is about them."""

    layouts: tuple[RankLayout, ...]


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Put its part of that pattern into every pool."""

    seed: int


class Overwrite(msgspec.Struct, frozen=True, tag=True):
    """Put something else into every pool."""


def pattern(layout: RankLayout, seed: int) -> torch.Tensor:
    """What is in a pool of that layout: its part of a whole instance's random numbers, of which
    each head of each layer has its own."""
    parts = [
        _plane(seed + 1009 * head + layer, layout)
        for head in range(layout.heads.start, layout.heads.stop)
        for layer in range(layout.layers.start, layout.layers.stop)
    ]
    return torch.stack(parts, 1).view(layout.shape).to(TORCH_DTYPES[layout.dtype])


def _plane(seed: int, layout: RankLayout) -> torch.Tensor:
    """(blocks, 2, block_size, D) of one head and layer."""
    blocks, _, _, _, block_size, head_dim = layout.shape
    return _numbers(seed, blocks * 2 * block_size * head_dim).view(blocks, 2, block_size, head_dim)


@functools.lru_cache(maxsize=4096)
def _numbers(seed: int, count: int) -> torch.Tensor:
    """Every shape of an instance asks for the same ones."""
    return torch.randint(-127, 128, (count,), generator=torch.Generator().manual_seed(seed))


class Exporter:
    """The end of who asks: starts the process, and speaks to it.

    Args:
        command: starts it.

    Raises:
        ChannelClosed, OSError: it has ended, or does not answer.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with ExitStack() as undo:
            self._channel, theirs = channel.make_pair()
            undo.callback(self._channel.close)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *command,
                        *("--channel", str(theirs.fileno()), "--parent", str(os.getpid())),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            self._channel.settimeout(PATIENCE_S)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.close()

    def make(self, layouts: Sequence[RankLayout]) -> list[int]:
        """Pools of those layouts: how to open each. Those before must not be open any more."""
        self._say(Make(tuple(layouts)))
        return [channel.receive_descriptor(self._channel)[1] for _ in layouts]

    def fill(self, seed: int) -> None:
        """Every pool has its part of that pattern when this returns."""
        self._have_done(Fill(seed))

    def overwrite(self) -> None:
        """Every pool has other contents when this returns."""
        self._have_done(Overwrite())

    def kill(self) -> None:
        """As hard as can be; idempotent."""
        self._process.kill()
        self._process.wait()

    def _have_done(self, message: Fill | Overwrite) -> None:
        self._say(message)
        if self._channel.recv(_MAX_BYTES) != DONE:
            raise channel.ChannelClosed("the exporter has ended")

    def _say(self, message: Make | Fill | Overwrite) -> None:
        self._channel.sendall(orjson.dumps(msgspec.to_builtins(message)))


class Pools(Protocol):
    """Makes them on one device, as every `Backend` does."""

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange: ...

    def release(self, exchange: KVExchange) -> None:
        """Give its pool back, which nobody has open any more."""
        ...

    def synchronize(self) -> None:
        """Until all that was asked of the device is done."""
        ...


def serve(device: Pools, own: socket.socket) -> None:
    """Do what is asked until the other end closes."""
    pools: list[OwnExchange] = []
    while text := own.recv(_MAX_BYTES):
        match msgspec.convert(orjson.loads(text), Make | Fill | Overwrite):
            case Make(layouts):
                for exchange in pools:
                    device.release(exchange)
                pools = [device.exchange(layout, OWNER) for layout in layouts]
                device.synchronize()
                for rank, exchange in enumerate(pools):
                    about = PoolDescriptor(WorkerName(OWNER, 0, rank), 1)
                    channel.send_descriptor(own, about, exchange.descriptor)
                continue
            case Fill(seed):
                for exchange in pools:
                    exchange.pool.copy_(pattern(exchange.layout, seed))
            case Overwrite():
                for exchange in pools:
                    exchange.pool.fill_(7.0)
        device.synchronize()
        own.sendall(DONE)


def run(device: Pools, argv: Sequence[str]) -> int:
    """The process, with what `Exporter` passes to it."""
    parser = argparse.ArgumentParser(prog="gpu_workers check-gpu-exporter")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments, _ = parser.parse_known_args(argv)
    lifeline.die_with_parent(arguments.parent)
    with socket.socket(fileno=arguments.channel) as own:
        serve(device, own)
    return 0
