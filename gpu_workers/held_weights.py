"""A model's weights in memory that several processes map: laid out once, taken by name.

Tensors lie in a segment in the order in which a model takes them, so that those it stacks lie side
by side. A segment is a memory file on CPU and an exported allocation on a GPU; either way it is
opened by a descriptor. Whoever has it open keeps it: no process's end takes it from the others.
"""

import os
from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch

from gpu_workers.cuda_routes import Gpu
from gpu_workers.weights import Cut, WeightSource
from ipc import kv_shm
from ipc.kv_cuda import DeviceMemory, as_bytes, read_handle, write_handle
from ipc.kv_layout import Span

ALIGNMENT = 16


class Place(msgspec.Struct, frozen=True):
    """Where a tensor, or the part of it that was taken, lies."""

    name: str
    dim: int | None  # of the cut, if it is a part
    span: Span | None
    shape: tuple[int, ...]
    segment: int
    offset: int


class Contents(msgspec.Struct, frozen=True):
    """All places, and the sizes of the segments."""

    places: tuple[Place, ...]
    segments: tuple[int, ...]


class Segments(Protocol):
    """Memory that processes share by descriptors."""

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Fresh memory (num_bytes,) uint8, and a descriptor by which others open it."""
        ...

    def open(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        """What another process made; takes over the descriptor."""
        ...

    def check(self) -> None:
        """Raises CudaError: the device failed, and what we made there is lost."""
        ...


class HostSegments:
    """Memory files."""

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        descriptor = kv_shm.create(num_bytes, "weights")
        return _mapped(descriptor, num_bytes), descriptor

    def open(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        try:
            return _mapped(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """The host's memory does not fail."""


class GpuSegments:
    """Allocations of a GPU. What is opened stays open until the process ends."""

    def __init__(self, memory: DeviceMemory, gpu: Gpu, device: torch.device) -> None:
        self._memory, self._gpu, self._device = memory, gpu, device
        memory.runtime.use(gpu.index)

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        made = self._memory.allocate(num_bytes, self._gpu.uuid, what="the weights")
        view = as_bytes(made.address, num_bytes, self._device)
        return view, write_handle(made.handle, "weights")

    def open(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        try:
            opened = self._memory.open(read_handle(descriptor), self._gpu.index)
        finally:
            os.close(descriptor)
        return as_bytes(opened.address, num_bytes, self._device)

    def check(self) -> None:
        self._memory.runtime.check()


class Outline:
    """A `WeightSource` of tensors without memory: as a model takes them, they are counted.

    Args:
        shapes: every tensor of the whole model by its name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        shape = list(self._shapes[name])
        if cut is not None:
            shape[cut.dim] = cut.span.size
        return torch.empty(shape, dtype=self._dtype, device="meta")


class Counted:
    """Another `WeightSource`, and how many bytes a recorder needs for all that it gave."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.num_bytes = 0

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        found = self._source.take(name, cut)
        self.num_bytes += _aligned(found.nbytes)
        return found


class Recorder:
    """A `WeightSource` that keeps what it gives, in segments.

    Args:
        source: gives the tensors, where the segments are.
        segment_bytes: of a segment, unless one tensor is larger. Tensors on either side of a
            segment's end cannot be stacked without a copy, which each process would pay for: it
            should be all there is to take.
    """

    def __init__(self, source: WeightSource, segments: Segments, *, segment_bytes: int) -> None:
        self._source, self._segments, self._segment_bytes = source, segments, segment_bytes
        self._memory: list[torch.Tensor] = []
        self._used = 0
        self._places: list[Place] = []
        self.descriptors: list[int] = []

    @property
    def contents(self) -> Contents:
        return Contents(tuple(self._places), tuple(len(memory) for memory in self._memory))

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        found = self._source.take(name, cut)
        self._make_room(found.nbytes)
        place = Place(
            name,
            cut.dim if cut else None,
            cut.span if cut else None,
            tuple(found.shape),
            len(self._memory) - 1,
            self._used,
        )
        self._places.append(place)
        self._used += _aligned(found.nbytes)
        kept = _view(self._memory, place, found.dtype)
        kept.copy_(found)
        return kept

    def _make_room(self, num_bytes: int) -> None:
        if self._memory and self._used + num_bytes <= len(self._memory[-1]):
            return
        memory, descriptor = self._segments.make(max(num_bytes, self._segment_bytes))
        self._memory.append(memory)
        self.descriptors.append(descriptor)
        self._used = 0


class HeldWeights:
    """A `WeightSource` of what another process recorded. Its tensors are not to be changed."""

    def __init__(self, contents: Contents, memory: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors = {
            (place.name, place.dim, place.span): _view(memory, place, dtype)
            for place in contents.places
        }

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        return self._tensors[name, cut.dim if cut else None, cut.span if cut else None]


def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts as one tensor, one below the other; without a copy where they lie so."""
    first = parts[0]
    if len(parts) == 1 or not _lie_side_by_side(parts):
        return torch.cat(parts) if len(parts) > 1 else first
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _lie_side_by_side(parts: list[torch.Tensor]) -> bool:
    storage = parts[0].untyped_storage().data_ptr()
    end = parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage and part.is_contiguous()
        if not same or part.data_ptr() != end or part.shape[1:] != parts[0].shape[1:]:
            return False
        end += part.nbytes
    return True


def _view(memory: list[torch.Tensor], place: Place, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = torch.Size(place.shape).numel() * dtype.itemsize
    flat = memory[place.segment][place.offset : place.offset + num_bytes]
    return flat.view(dtype).view(place.shape)


def _mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(kv_shm.map_pool(descriptor, num_bytes), dtype=torch.uint8)
