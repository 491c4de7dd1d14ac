"""A device without numbers: tensors on torch's `meta`, so that the host's are told from its own.

On CPU memory everything may meet everything. Here an operation over tensors of both sides is
refused, as a GPU refuses it, and so is reading a number, which there is none to read.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
COPIES = ("aten::copy_", "aten::_to_copy")


class OneSide(TorchDispatchMode):
    """Refuses operations over tensors of both sides; numbers without a dimension may come along."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = [*tensors_in((*args, *(kwargs or {}).values()))]
        sides = {tensor.device.type for tensor in given if tensor.dim()}
        name = func.name().split(".")[0]
        assert len(sides) <= 1 or name in COPIES, f"{name} over tensors of {sorted(sides)}"
        return func(*args, **(kwargs or {}))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


class Nothing:
    """Event and graph of a device that does nothing."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def replay(self) -> None: ...


class MetaDevice:
    """`Device` of tensors without numbers."""

    torch_device = META

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._check(host=source, device=target)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._check(host=target, device=source)

    def event(self) -> Nothing:
        return Nothing()

    def capture(self, run: Callable[[], None]) -> Nothing:
        run()
        return Nothing()

    def synchronize(self) -> None: ...

    def memory(self) -> tuple[int, int]:
        return 1 << 37, 1 << 37

    def _check(self, *, host: torch.Tensor, device: torch.Tensor) -> None:
        assert (host.device.type, device.device.type) == ("cpu", "meta")
        assert (host.dtype, host.shape) == (device.dtype, device.shape)
        assert host.is_contiguous()
        assert device.is_contiguous()


class MetaFlashInfer:
    """The library's kernels, which are given only what the device has."""

    __version__ = "meta"

    def BatchDecodeWithPagedKVCacheWrapper(self, *given: Any, **named: Any) -> "MetaWrapper":
        return MetaWrapper(*given, *named.values())

    BatchPrefillWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        on_device(x, weight)
        return torch.empty_like(x)

    def fused_add_rmsnorm(self, *given: Any, eps: float) -> None:
        on_device(*given)

    def silu_and_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        on_device(x, out)

    def append_paged_kv_cache(self, *given: Any, kv_layout: str) -> None:
        on_device(*given)

    def apply_rope_with_cos_sin_cache_inplace(self, *given: Any, is_neox: bool) -> None:
        on_device(*given)


class MetaWrapper:
    """Plans are made from tables of the host, but for the pages themselves."""

    def __init__(self, *given: Any) -> None:
        on_device(*given)

    def reset_workspace_buffer(self, *given: torch.Tensor) -> None:
        on_device(*given)

    def plan(self, *tables: torch.Tensor, **named: Any) -> None:
        assert [table.device.type for table in tables[-3:]] == ["cpu", "meta", "cpu"]
        assert all(table.device.type == "cpu" for table in tables[:-3])

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        on_device(q, kv, out)


def on_device(*given: Any) -> None:
    for tensor in tensors_in(given):
        assert tensor.device == META
