"""A device on CPU memory that is behind: what it is asked for it does later, in order.

While its stream is on (`with device.stream:`), every operation of torch's on its memory is put into
a queue, as CUDA does, and whoever looks at the result too early sees what was there before. The
device gets on when the host waits for it, and at moments that a seed decides. Memory is the
device's once something was uploaded to it, computed into it, or told by `adopt`.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu_workers.cuda.fake_device import FakeDevice, FakeGraph, UsedTooEarly
from tests.gpu_workers.cuda.no_reading import READING

PACES = (0, 0, 0, 1, 3, 1000)  # things done for each that is asked for
STRIDE = 300  # things asked for at one pace, in the mean: a few steps
FIRST_SWEEP = 4096
POISON = 0xA5  # what fresh memory holds: no number that anybody computed


class _Asked(NamedTuple):
    at: int
    run: Callable[[], object]


class LaggingDevice(FakeDevice):
    """`num_behind_most` is how far it has been behind: things asked for and not done."""

    def __init__(self, total_bytes: int = 80 << 30, *, seed: int = 0) -> None:
        super().__init__(total_bytes)
        self.stream = Stream(self)
        self.num_behind_most = 0
        self._random = random.Random(seed)
        self._pace = 0
        self._queue: deque[_Asked] = deque()
        self._is_running = False
        self._memory: dict[int, StorageWeakRef] = {}
        self._sweep_at = FIRST_SWEEP

    def shuffle(self, seed: int) -> None:
        """It gets on at other moments from now on."""
        self._random = random.Random(seed)

    def do(self, run: Callable[[], object]) -> None:
        if self._is_running:
            run()
            return
        self._queue.append(_Asked(self.tick(), run))
        self.num_behind_most = max(self.num_behind_most, len(self._queue))
        if not self._random.randrange(STRIDE):
            self._pace = self._random.choice(PACES)
        for _ in range(min(self._pace, len(self._queue))):
            self._run_next()

    def pass_to(self, at: int) -> None:
        self.past = max(self.past, at)
        while self._queue and self._queue[0].at <= at:
            self._run_next()

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype, "a copy of its own changes no types"
        self.adopt(target)
        sent = source.clone()

        def run() -> None:
            if not torch.equal(source, sent):
                raise UsedTooEarly("pinned memory changed before its copy had run")
            target.copy_(source)

        self.do(run)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype, "a copy of its own changes no types"
        self.do(lambda: target.copy_(source))

    def capture(self, run: Callable[[], None]) -> FakeGraph:
        self.synchronize()
        self._is_running = True
        try:
            return super().capture(run)
        finally:
            self._is_running = False

    def adopt(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._memory[storage._cdata] = StorageWeakRef(storage)
        if len(self._memory) > self._sweep_at:
            self._memory = {k: ref for k, ref in self._memory.items() if not ref.expired()}
            self._sweep_at = FIRST_SWEEP + 2 * len(self._memory)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether that is in the device's memory. A weak reference keeps an address from being
        given out again."""
        return tensor.untyped_storage()._cdata in self._memory

    @property
    def is_running(self) -> bool:
        """Whether the device is at work, and not the host."""
        return self._is_running

    @torch.inference_mode()
    def _run_next(self) -> None:
        asked = self._queue.popleft()
        self._is_running = True
        try:
            with torch._C._DisableTorchDispatch():
                asked.run()
        finally:
            self._is_running = False


class Stream(TorchDispatchMode):
    """Puts operations on a device's memory into its queue."""

    def __init__(self, device: LaggingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        device = self._device
        if device.is_running or not any(map(device.has, _tensors((args, [*named.values()])))):
            return func(*args, **named)
        kind = _kind_of(func)
        if kind.is_reading:  # CUDA waits by itself
            device.synchronize()
            return func(*args, **named)
        if kind.target is not None:
            target = kind.target_of(args, named)
            device.adopt(target)
            device.do(lambda: func(*args, **named))
            return target
        if kind.is_view:
            if not kind.is_made_of_others:
                return func(*args, **named)
            with self:
                return func.decompose(*args, **named)
        return self._later(func, args, named)

    def _later(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """The results' memory now, their contents when their turn comes."""
        made = [_fresh(shape) for shape in _shapes_of(func, args, named)]
        self._device.adopt(*made)

        def run() -> None:
            for ours, theirs in zip(made, _tensors((func(*args, **named),)), strict=True):
                ours.copy_(theirs)

        self._device.do(run)
        return made[0] if len(func._schema.returns) == 1 else tuple(made)


class _Kind(NamedTuple):
    """What an operation does to its arguments, by its schema."""

    is_reading: bool
    is_view: bool
    is_made_of_others: bool
    target: tuple[int, str] | None  # place and name of what is written and returned

    def target_of(self, args: Any, named: dict[str, Any]) -> torch.Tensor:
        assert self.target is not None
        place, name = self.target
        found: torch.Tensor = named[name] if name in named else args[place]
        return found


@cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert len(written) <= 1, f"{func} writes to several tensors"
    return _Kind(
        is_reading=func.name().split(".")[0] in (*READING, "aten::equal"),
        is_view=any(result.alias_info is not None for result in schema.returns),
        is_made_of_others=func._can_decompose(),
        target=written[0] if written else None,
    )


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _shapes_of(func: Any, args: Any, named: dict[str, Any]) -> list[_Shape]:
    """Of an operation's results, by those of its arguments alone."""
    placed = {name: "meta" if name == "device" else value for name, value in named.items()}
    return _reckoned(func, _told(args), tuple((name, _told((v,))) for name, v in placed.items()))


@cache
def _reckoned(func: Any, args: Any, named: Any) -> list[_Shape]:
    found = func(*_empty(args), **{name: _empty(value)[0] for name, value in named})
    return list(_told(_tensors((found,))))


def _told(values: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments with shapes in place of tensors."""
    return tuple(
        _Shape(tuple(value.size()), value.stride(), value.dtype)
        if isinstance(value, torch.Tensor)
        else _told(value)
        if isinstance(value, list | tuple)
        else value
        for value in values
    )


def _empty(values: Iterable[Any]) -> list[Any]:
    """Arguments with tensors that have no memory in place of shapes."""
    return [
        torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")
        if isinstance(value, _Shape)
        else _empty(value)
        if isinstance(value, tuple)
        else value
        for value in values
    ]


def _fresh(shape: _Shape) -> torch.Tensor:
    made = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)
    made.untyped_storage().fill_(POISON)
    return made
