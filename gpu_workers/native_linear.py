"""Linear layers on CPU in bf16 by the compiled kernels, and by oneDNN where that has more to use.

Decode is bound by reading every weight once, and the compiled kernel streams packed panels at the
speed of memory. It comes near the peak of AVX512-BF16 for prompts as well; but a CPU with a matrix
unit (AMX), or several threads, multiply many rows faster through oneDNN. There one packed copy
serves both: oneDNN's layout for bf16 is the very one that our kernel reads, which is found out by
comparing bytes, once for each shape. Where it is another, the compiled kernel serves all sizes.
"""

import ctypes
from functools import cache

import torch
import torch.nn.functional as F

from gpu_workers.cpu_linear import BATCH_HINT, can_pack
from gpu_workers.models.config import Activation
from gpu_workers.native_calls import Calls, LinearArguments, Outputs

COLUMNS = 64  # of a panel, as in kernels.c
FINITE_BF16 = 0x7F80  # as bits, all below are finite
MAX_ROWS_BESIDE_AMX = 8  # more are not bound by memory, and the matrix unit takes 16 at once


class PanelLinear:
    """A bf16 weight (out, in), `in` even, in panels."""

    def __init__(
        self,
        calls: Calls,
        outputs: Outputs,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> None:
        self.out_features, inputs = weight.shape
        self._outputs = outputs
        self._run = calls.linear
        self._bias = bias
        self._gelu = activation is Activation.GELU
        self._relu = activation is Activation.RELU
        self._packed = _shared_pack(calls, weight)
        if self._packed is None:
            self._panels = pack_panels(calls, weight)
            panels = self._panels.data_ptr()
        else:
            panels = _address(self._packed)
        self._arguments = LinearArguments(
            panels=panels,
            bias=None if bias is None else bias.data_ptr(),
            units=inputs // 2,
            outputs=self.out_features,
            relu=self._relu,
        )
        self._self = ctypes.addressof(self._arguments)
        self._max_rows = 0 if torch.get_num_threads() > 1 else MAX_ROWS_BESIDE_AMX

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows > self._max_rows and self._packed is not None:
            y = self._multiply_packed(x)
        else:
            x = x.contiguous()
            y, address = self._outputs.take("linear", rows, self.out_features)
            self._run(self._self, x.data_ptr(), address, rows)
        return F.gelu(y) if self._gelu else y

    def _multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        post_op = "relu" if self._relu else "none"
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, post_op, [], ""
        )
        return y


def has_matrix_unit() -> bool:
    """Whether oneDNN and torch multiply bf16 by tiles (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies many rows faster than our kernel by one thread's vectors."""
    return has_matrix_unit() or torch.get_num_threads() > 1


def pack_panels(calls: Calls, weight: torch.Tensor) -> torch.Tensor:
    """int32 [out / 64, rounded up][in / 2][64]: pairs of neighbouring inputs of 64 outputs."""
    out_features, inputs = weight.shape
    panels = torch.empty(-(-out_features // COLUMNS), inputs // 2, COLUMNS, dtype=torch.int32)
    calls.pack_weight(weight.contiguous().data_ptr(), panels.data_ptr(), out_features, inputs // 2)
    return panels


def _shared_pack(calls: Calls, weight: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's opaque packed tensor, if it has its uses here and both kernels can read it."""
    if not (
        onednn_is_faster() and _has_packs(weight.dtype) and _packs_panels(calls, *weight.shape)
    ):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)
    return packed


def _has_packs(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    return (
        can_pack(dtype)
        and all(hasattr(operators, name) for name in ("data_ptr", "_nbytes"))
        and bool(operators._is_mkldnn_bf16_supported())
    )


@cache
def _packs_panels(calls: Calls, out_features: int, inputs: int) -> bool:
    """Whether oneDNN packs weights of that shape into the panels that our kernel reads."""
    numbers = torch.arange(out_features * inputs, dtype=torch.int32) % FINITE_BF16
    weight = numbers.to(torch.int16).view(torch.bfloat16).view(out_features, inputs)
    theirs = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)
    ours = pack_panels(calls, weight)
    num_bytes = ours.numel() * ours.element_size()
    if torch.ops.mkldnn._nbytes(theirs) != num_bytes:
        return False
    raw = (ctypes.c_char * num_bytes).from_address(_address(theirs))
    return torch.equal(torch.frombuffer(raw, dtype=torch.int32), ours.view(-1))


def _address(packed: torch.Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(packed))
