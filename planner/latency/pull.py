"""How long a decode instance takes to pull one prompt's keys and values.

Every rank pulls its own part, all at once, each over a link of its own: what counts is the
largest part. Queues for a shared link are the simulator's affair.
"""

from dataclasses import dataclass

from ipc.vocabulary import Parallelism
from planner.devices import DeviceSheet
from planner.latency.interface import Estimate, LatencyModel, Source
from planner.memory import block_bytes
from planner.model_shape import ModelShape


@dataclass(frozen=True)
class Pull:
    """A straight line: the handshake, then bytes over the link of the rank with most to copy."""

    bytes_per_token: float
    bytes_per_s: float
    handshake_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.handshake_s + num_tokens * self.bytes_per_token / self.bytes_per_s


def pull_over(
    device: DeviceSheet, shape: ModelShape, parallelism: Parallelism, *, across_nodes: bool = False
) -> Pull:
    """A pull over the device's links: within a node, or across nodes."""
    per_token = block_bytes(shape, parallelism, block_size=1)
    if across_nodes:
        return Pull(per_token, device.inter_bytes_per_s, device.inter_handshake_s)
    return Pull(per_token, device.intra_bytes_per_s, device.intra_handshake_s)


class WithPull:
    """A latency model whose pulls go over another link than it knows."""

    def __init__(self, model: LatencyModel, pull: Pull) -> None:
        self.model = model
        self.num_stages, self.num_devices = model.num_stages, model.num_devices
        self.slowest = model.slowest
        self.source = model.source
        self._pull = pull
        # Bound once: the simulator asks these for every step.
        self.prefill, self.decode, self.mixed = model.prefill, model.decode, model.mixed

    def transfer(self, num_tokens: int) -> Estimate:
        return Estimate(self._pull.seconds(num_tokens), Source.ROOFLINE)
