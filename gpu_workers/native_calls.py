"""How Python and the compiled library speak: structs as its C files declare them, its functions.

Addresses travel as plain ints: a decode step makes some 300 calls, and each argument counts. What
does not change from call to call is in a struct, filled once.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from typing import Any

import torch

from gpu_workers.native_build import NativeLibrary
from gpu_workers.scratch import Scratch

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # of the kernels
SUMMED_TYPES = ELEMENT_TYPES | {torch.float16: 2}
RANK_BYTES = 128  # of `Rank` in collectives.c
MAX_VIEWS = 256  # a prefill worker sees many lengths, each once


class NormArguments(ctypes.Structure):
    """`Norm` in kernels.c."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("width", c_int64),
        ("eps", c_float),
        ("centred", c_int32),
        ("type", c_int32),
    )


class LinearArguments(ctypes.Structure):
    """`Linear` in kernels.c."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("units", c_int64),
        ("outputs", c_int64),
        ("relu", c_int32),
    )


class Step(ctypes.Structure):
    """`Step` in kernels.c."""

    _fields_ = (
        ("pool", c_void_p),
        ("rope", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_table", c_void_p),
        ("computed", c_void_p),
        ("panels", c_void_p),
        ("num_heads", c_int64),
        ("kv_heads", c_int64),
        ("num_layers", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("num_tokens", c_int64),
        ("num_decode", c_int64),
        ("table_width", c_int64),
        ("scale", c_float),
        ("type", c_int32),
    )


class StageArguments(ctypes.Structure):
    """`Stage` in collectives.c."""

    _fields_ = (
        ("ranks", c_void_p),
        ("slots", c_void_p),
        ("slot_bytes", c_int64),
        ("spin_ns", c_int64),
        ("timeout_ns", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
        ("state", c_uint32),
    )


class Ended(IntEnum):
    """How a call of collectives.c ended: a rank was silent for too long, or has left."""

    DONE = 0
    LATE = 1
    GONE = 2


class StageCalls:
    """The library's collectives; their arguments are described in collectives.c."""

    def __init__(self, library: NativeLibrary) -> None:
        def declare(name: str, result: Any, *arguments: Any) -> Any:
            function = library.functions[name]
            function.argtypes, function.restype = arguments, result
            return function

        self.sum = declare("stage_sum", c_int32, c_void_p, c_void_p, c_int64, c_int32)
        self.gather = declare(
            "stage_gather", c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64
        )
        self.leave = declare("stage_leave", None, c_void_p)


class Calls:
    """The library's kernels; their arguments are described in kernels.c."""

    def __init__(self, library: NativeLibrary) -> None:
        self.isa = library.isa

        def declare(name: str, *arguments: Any) -> Any:
            function = library.functions[name]
            function.argtypes, function.restype = arguments, None
            return function

        self.apply_norm = declare("apply_norm", c_void_p, c_void_p, c_void_p, c_void_p, c_int64)
        self.silu_mul = declare("silu_mul", c_void_p, c_void_p, c_int64, c_int64, c_int32)
        self.touch_pages = declare("touch_pages", c_void_p, c_int64, c_int64)
        self.pack_weight = declare("pack_weight", c_void_p, c_void_p, c_int64, c_int64)
        self.linear = declare("linear", c_void_p, c_void_p, c_void_p, c_int64)
        self.append = declare("append", c_void_p, c_int64, c_void_p)
        self.decode_attention = declare("decode_attention", c_void_p, c_int64, c_void_p, c_void_p)
        self.attention = declare(
            "attention", c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64
        )


class Outputs:
    """Buffers for results, by operation and width, with their addresses."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._scratch = Scratch(dtype)
        self._views: dict[tuple[str, int, int], tuple[torch.Tensor, int]] = {}
        self._addresses: dict[str, int] = {}

    def take(self, name: str, rows: int, width: int) -> tuple[torch.Tensor, int]:
        """A (rows, width) tensor of arbitrary contents and where it is."""
        found = self._views.get((name, rows, width))
        return found or self._view(name, rows, width)

    def _view(self, name: str, rows: int, width: int) -> tuple[torch.Tensor, int]:
        buffer = f"{name}-{width}"
        view = self._scratch.take(buffer, rows, width)
        address = view.data_ptr()
        # Views of a buffer that has been outgrown would keep it alive.
        if self._addresses.get(buffer) != address or len(self._views) >= MAX_VIEWS:
            self._views.clear()
        self._addresses[buffer] = address
        self._views[name, rows, width] = view, address
        return view, address
