"""Linear layers on CPU: oneDNN's packed weights where torch offers them, plain ones elsewhere.

The packing operators are the ones that torch's compiler uses (`torch.ops.mkldnn`): not a promised
interface, so they are tried once per element type and done without if they fail.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from gpu_workers.models.config import Activation

BATCH_HINT = 32  # one pack serves every batch size; a hint of 1 is slower for prompts
POST_OPS = {None: ("none", ""), Activation.RELU: ("relu", ""), Activation.GELU: ("gelu", "none")}
ACTIVATIONS: dict[Activation | None, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
}


class PackedLinear:
    """A weight in oneDNN's own layout, with bias and activation fused into the product."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
    ) -> None:
        self.out_features = len(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)
        self._bias = bias
        self._post_op, self._algorithm = POST_OPS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, self._post_op, [], self._algorithm
        )
        return y


class DenseLinear:
    """The same on a plain weight: the reference, and where packing is not available."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
    ) -> None:
        self.out_features = len(weight)
        self._weight = weight
        self._bias = bias
        self._activation = ACTIVATIONS.get(activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if self._activation is None else self._activation(y)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU multiply by packed weights of that type."""
    try:
        probe = PackedLinear(torch.ones(8, 8, dtype=dtype), None, None)
        return bool(probe(torch.ones(1, 8, dtype=dtype)).eq(8).all())
    except (AttributeError, RuntimeError, TypeError):
        return False
