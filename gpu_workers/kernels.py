"""The seam between a model and the device that computes it.

A model is written once against `Kernels`; what differs between devices (packed weights, fused
passes, how attention finds its pages) is behind it. One kernels object belongs to one worker: it
knows the KV pool, the attention geometry and the rotary table, and it may own every buffer it
returns.

**Returned tensors may be scratch**: one holds its value until the same operation is called again
with the same width. Models use results at once and never keep them across layers, except the
residual stream, which the model owns.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_workers.batch import Batch
from gpu_workers.models.config import Activation


@dataclass(frozen=True, slots=True)
class Geometry:
    """What attention must know beyond the pool's shape.

    `num_heads` are the query heads held here; `scale` multiplies q k^T; `rope` is fp32
    [positions, 2, head_dim / 2] (cosines, sines) or None where positions are learned.
    """

    num_heads: int
    scale: float
    rope: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """Weights of an RMSNorm (no bias) or a LayerNorm: [width] each."""

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None


class Linear(Protocol):
    """A weight [out, in] with optional bias and activation, packed as the device likes it."""

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in) -> (N, out)."""
        ...


class Kernels(Protocol):
    """All the arithmetic of a forward pass. T is the number of tokens of the prepared batch."""

    @property
    def name(self) -> str:
        """For logs and metrics, such as `torch-mkldnn`."""
        ...

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Linear:
        """Take over a dense weight [out, in], bias [out] and an activation applied to the result.

        The caller drops its own reference, so that a repacked weight is held once.
        """
        ...

    def prepare(self, batch: Batch) -> None:
        """Once per step, before the model: what follows until the next call is about `batch`."""
        ...

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add x to `residual` in place and return the norm of the sum."""
        ...

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add x to `residual` in place and return the norm of the sum."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(N, 2 * width), gate first -> (N, width): silu(gate) * up."""
        ...

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        """Rotate q and k (where the geometry has RoPE) and write k and v into the pool.

        Args:
            layer: index among the layers held here.
            qkv: (T, (heads + 2 * kv_heads) * head_dim), heads of q first, then k, then v.
                May be changed in place.
        """
        ...

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Causal attention of every row over its own sequence, after `append`.

        Args:
            layer: as in `append`.
            qkv: the tensor that was given to `append`.

        Returns:
            (T, heads * head_dim)
        """
        ...
