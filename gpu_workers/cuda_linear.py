"""Linear layers on a GPU: cuBLAS products, with bias and ReLU in the product's epilogue."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpu_workers.models.config import Activation

ACTIVATIONS: dict[Activation | None, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.RELU: torch.relu_,
    Activation.GELU: F.gelu,
}


class CudaLinear:
    """A weight [out, in] on the device with optional bias and activation.

    torch's one call with an activation in it knows ReLU, and GELU in an approximation that our
    models do not mean; where it is not there, an activation is a pass of its own.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
    ) -> None:
        self.out_features = len(weight)
        self._weight = weight
        self._bias = bias
        fused = getattr(torch, "_addmm_activation", None)
        can_fuse = activation is Activation.RELU and bias is not None
        self._fused: Callable[..., torch.Tensor] | None = fused if can_fuse else None
        self._activation = ACTIVATIONS.get(activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(self._bias, x, self._weight.t(), use_gelu=False)
        y = F.linear(x, self._weight, self._bias)
        return y if self._activation is None else self._activation(y)
