"""`python -P -m gpu_workers check-gpu-exporter`: the other process of pulls, which starts it.

It loads what pools take and nothing else: whoever waits for it waits for its imports.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from gpu_workers.check_gpu import exporter
from gpu_workers.check_gpu.exporter import Pools
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.cuda_exchange import CudaExchange, exchange_on
from gpu_workers.kv_exchange import KVExchange, OwnExchange
from ipc.kv_layout import RankLayout


def main(argv: Sequence[str]) -> int:
    """The device is said by who pulls; the rest is between it and `exporter`."""
    parser = argparse.ArgumentParser(prog="gpu_workers check-gpu-exporter")
    parser.add_argument("--device", default="cpu")
    arguments, rest = parser.parse_known_args(argv)
    return exporter.run(_pools_on(torch.device(arguments.device)), rest)


def _pools_on(device: torch.device) -> Pools:
    return CpuPools() if device.type == "cpu" else CudaPools(device)


class CpuPools:
    """In memory files."""

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return CpuExchange(layout, label)

    def release(self, exchange: KVExchange) -> None:
        assert isinstance(exchange, CpuExchange)
        exchange.close()

    def synchronize(self) -> None:
        """Everything is done when its call returns."""


class CudaPools:
    """In the memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.set_device(device)

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> OwnExchange:
        return exchange_on(self._device, layout, label, **how)

    def release(self, exchange: KVExchange) -> None:
        assert isinstance(exchange, CudaExchange)
        exchange.close()
        exchange.free()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
