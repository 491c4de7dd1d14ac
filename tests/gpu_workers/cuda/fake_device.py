"""A device on CPU memory that says when something was used too early.

Its clock counts what it was asked for; what has been waited for is past. Uploads happen at once but
remember their source, which must not change before they are past; downloads happen only then; a
graph remembers addresses and refuses to be replayed on others.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

Address = tuple[object, ...]


class UsedTooEarly(AssertionError):
    """On a real device this would have read or overwritten what is not there yet."""


@dataclass
class _Upload:
    source: torch.Tensor
    sent: torch.Tensor
    at: int


@dataclass
class _Download:
    content: torch.Tensor
    target: torch.Tensor
    at: int


@dataclass
class FakeEvent:
    device: "FakeDevice"
    at: int = 0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.num_waits += 1
        self.device.pass_to(self.at)


@dataclass
class FakeGraph:
    device: "FakeDevice"
    run: Callable[[], None]
    addresses: list[Address]

    def replay(self) -> None:
        self.device.num_replays += 1
        self.device.do(self._run)

    def _run(self) -> None:
        with torch.inference_mode():
            seen = self.device.watching(self.run)
        if seen != self.addresses:
            raise UsedTooEarly("a graph was replayed on other memory than it was captured on")


class FakeDevice:
    """`Device` for tests."""

    torch_device = torch.device("cpu")

    def __init__(self, total_bytes: int = 80 << 30) -> None:
        self.now = 0
        self.past = 0
        self.num_waits = self.num_replays = 0
        self.is_capturing = False
        self.total_bytes = self.free_bytes = total_bytes
        self._uploads: list[_Upload] = []
        self._downloads: list[_Download] = []
        self._watched: list[Address] | None = None
        self._passing = threading.Lock()  # one that watches the device waits in a thread of its own

    def tick(self) -> int:
        """One more thing was asked for."""
        self.now += 1
        return self.now

    def do(self, run: Callable[[], object]) -> None:
        """One more thing is asked for, and here it is done at once."""
        self.tick()
        run()

    def adopt(self, *tensors: torch.Tensor) -> None:
        """That is the device's memory."""

    @torch.inference_mode()
    def pass_to(self, at: int) -> None:
        """The host has waited until there."""
        with self._passing:
            self.past = max(self.past, at)
            for upload in [u for u in self._uploads if u.at <= self.past]:
                self._check(upload)
                self._uploads.remove(upload)
            for download in [d for d in self._downloads if d.at <= self.past]:
                download.target.copy_(download.content)
                self._downloads.remove(download)

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size,), 77, dtype=dtype)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype, "a copy of its own changes no types"
        for other in self._uploads:
            self._check(other)
        target.copy_(source)
        self._uploads.append(_Upload(source, source.clone(), self.tick()))

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype, "a copy of its own changes no types"
        self._downloads.append(_Download(source.clone(), target, self.tick()))

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def capture(self, run: Callable[[], None]) -> FakeGraph:
        """Runs it once to see what it touches; a real capture computes nothing."""
        self.is_capturing = True
        addresses = self.watching(run)
        self.is_capturing = False
        return FakeGraph(self, run, addresses)

    def synchronize(self) -> None:
        self.pass_to(self.now)

    def memory(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def watching(self, run: Callable[[], None]) -> list[Address]:
        """What `run` tells `watch`."""
        self._watched = watched = []
        run()
        self._watched = None
        return watched

    def watch(self, *tensors: torch.Tensor) -> None:
        """Fixed memory that a kernel was given."""
        if self._watched is not None:
            self._watched.append(tuple(tensor.data_ptr() for tensor in tensors))

    def _check(self, upload: _Upload) -> None:
        if not torch.equal(upload.source, upload.sent):
            raise UsedTooEarly("pinned memory changed before its copy had run")
