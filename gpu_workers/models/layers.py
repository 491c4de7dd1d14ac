"""What both model families are made of: the face of a model, its stages, how weights are packed."""

from collections.abc import Mapping
from typing import Protocol

import torch

from gpu_workers.batch import Batch
from gpu_workers.kernels import Kernels, Linear, Norm
from gpu_workers.models.config import Activation, ModelConfig
from gpu_workers.weights import WeightSource
from ipc.kv_layout import Span

Shapes = dict[str, tuple[int, ...]]


class Model(Protocol):
    """One pipeline stage of a decoder: consecutive layers, with the ends if it holds them."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layers(self) -> Span:
        """The global indices of the layers held here."""
        ...

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run a prepared batch through the layers.

        Args:
            batch: the step's rows; `Kernels.prepare` has been called with it.
            hidden: (T, hidden_size) from the stage before; None on the first stage.

        Returns:
            (T, hidden_size) for the next stage, or on the last stage (head_rows, hidden_size):
            only the tokens that `batch.head_rows` names.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, hidden_size) -> (N, vocab_size); last stage only. May be a kernels' buffer."""
        ...


def holds_first(layers: Span) -> bool:
    """Whether the stage embeds tokens."""
    return layers.start == 0


def holds_last(layers: Span, config: ModelConfig) -> bool:
    """Whether the stage ends in the LM head."""
    return layers.stop == config.num_layers


def pick_head_rows(
    batch: Batch, attended: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """After the last attention only the tokens that go through the LM head are still needed."""
    if batch.head_rows is None:
        return attended, residual
    return attended.index_select(0, batch.head_rows), residual.index_select(0, batch.head_rows)


def linear_shapes(prefix: str, weights: Mapping[str, tuple[int, int]], *, bias: bool) -> Shapes:
    """Weights [out, in] by name, and their biases [out] where the model has them."""
    shapes: Shapes = {f"{prefix}{name}.weight": shape for name, shape in weights.items()}
    if bias:
        shapes |= {f"{prefix}{name}.bias": shape[:1] for name, shape in weights.items()}
    return shapes


class Loader:
    """Takes named tensors from a source and turns them into what kernels compute with."""

    def __init__(self, kernels: Kernels, weights: WeightSource, norm_eps: float) -> None:
        self._kernels = kernels
        self._weights = weights
        self._norm_eps = norm_eps

    def tensor(self, name: str) -> torch.Tensor:
        return self._weights.take(name)

    def norm(self, name: str, *, bias: bool = False) -> Norm:
        offset = self.tensor(f"{name}.bias") if bias else None
        return Norm(self.tensor(f"{name}.weight"), self._norm_eps, offset)

    def linear(
        self, *names: str, bias: bool = False, activation: Activation | None = None
    ) -> Linear:
        """One packed product of the named layers, stacked along their outputs."""
        offset = self._stacked(names, "bias") if bias else None
        return self._kernels.pack(self._stacked(names, "weight"), offset, activation=activation)

    def _stacked(self, names: tuple[str, ...], what: str) -> torch.Tensor:
        parts = [self.tensor(f"{name}.{what}") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
