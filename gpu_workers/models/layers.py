"""What both model families are made of: the face of a model, its ends, how weights are divided.

Attention is divided by heads and the MLP by columns of its first product; the second product of
each gives a partial sum, which the stage's ranks add up. Embedding and head are divided by the
vocabulary. A worker that is alone in its stage computes with the plain products: nothing of this
is left at run time.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from gpu_workers.batch import Batch
from gpu_workers.collectives import Collectives
from gpu_workers.held_weights import stacked
from gpu_workers.kernels import Kernels, Linear, Norm
from gpu_workers.models.config import Activation, ModelConfig
from gpu_workers.weights import Cut, WeightSource
from ipc.kv_layout import Span
from ipc.sharding import Shard

Shapes = dict[str, tuple[int, ...]]
Embedding = Callable[[torch.Tensor], torch.Tensor]
"""Token ids (T,) -> (T, width)."""
Head = Callable[[torch.Tensor], torch.Tensor | None]
"""(N, width) -> (N, vocabulary, padded to a multiple of tp) on tp rank 0, None elsewhere."""


class Model(Protocol):
    """One worker's share of a decoder: consecutive layers, with the ends if it holds them."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shard(self) -> Shard:
        """What is held here."""
        ...

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run a prepared batch through the layers.

        Args:
            batch: the step's rows; `Kernels.prepare` has been called with it.
            hidden: (T, hidden_size) from the stage before, changed in place; None on the first
                stage.

        Returns:
            (T, hidden_size) for the next stage, or on the last stage (head_rows, hidden_size):
            only the tokens that `batch.head_rows` names.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(N, hidden_size) -> (N, vocabulary, maybe padded), on the last stage, by all its ranks
        together; tp rank 0 has them, the others get None. May be a kernels' buffer."""
        ...


def head_block(shard: Shard) -> int | None:
    """The index here of the model's last layer, if it is here."""
    return shard.layers.size - 1 if shard.is_last_stage else None


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
    """Takes a shard's part of named tensors and turns them into what kernels compute with."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        weights: WeightSource,
        shard: Shard,
        collectives: Collectives,
    ) -> None:
        self.config = config
        self.shard = shard
        self._kernels = kernels
        self._weights = weights
        self._collectives = collectives
        self._is_divided = shard.parallelism.tp > 1

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, the same on every rank of the stage."""
        return self._weights.take(name)

    def norm(self, name: str, *, bias: bool = False) -> Norm:
        offset = self.tensor(f"{name}.bias") if bias else None
        return Norm(self.tensor(f"{name}.weight"), self.config.norm_eps, offset)

    def linear(self, name: str) -> Linear:
        """A product that every rank of the stage computes whole."""
        return self._kernels.pack(self.tensor(f"{name}.weight"))

    def qkv(self, prefix: str) -> Linear:
        """The projections of our query heads and of the KV heads that they use."""
        q, kv = self._widths(self.shard.heads), self._widths(self.shard.kv_heads)
        parts = {f"{prefix}.q_proj": q, f"{prefix}.k_proj": kv, f"{prefix}.v_proj": kv}
        return self._columns(parts, bias=self.config.attention_bias)

    def attention_out(self, name: str) -> Linear:
        """What our heads add to the residual, summed over the stage."""
        return self._rows(name, self._widths(self.shard.heads), bias=self.config.attention_bias)

    def mlp_in(self, *names: str, activation: Activation | None = None) -> Linear:
        """Our columns of each of the named products, side by side."""
        parts = dict.fromkeys(names, self.shard.columns)
        return self._columns(parts, bias=self.config.mlp_bias, activation=activation)

    def mlp_out(self, name: str) -> Linear:
        """What our columns add to the residual, summed over the stage."""
        return self._rows(name, self.shard.columns, bias=self.config.mlp_bias)

    def vocabulary(self, name: str) -> torch.Tensor:
        """Our rows of a weight [vocabulary, width]; padding of the vocabulary is zero."""
        return self._weights.take(f"{name}.weight", Cut(0, self.shard.vocab))

    def embedding(self, weight: torch.Tensor) -> Embedding:
        """Look-up in what `vocabulary` returned."""
        if self._is_divided:
            return DividedEmbedding(weight, self.shard.vocab, self._collectives)
        return lambda token_ids: F.embedding(token_ids, weight)

    def head(self, weight: torch.Tensor) -> Head:
        """The product that ends in logits, of what `vocabulary` returned."""
        ours = self._kernels.pack(weight)
        if self._is_divided:
            return lambda hidden: self._collectives.gather_columns(ours(hidden))
        return ours

    def _widths(self, heads: Span) -> Span:
        """The elements of those heads."""
        return Span(heads.start * self.config.head_dim, heads.stop * self.config.head_dim)

    def _columns(
        self, parts: Mapping[str, Span], *, bias: bool, activation: Activation | None = None
    ) -> Linear:
        offset = self._stacked(parts, "bias") if bias else None
        return self._kernels.pack(self._stacked(parts, "weight"), offset, activation=activation)

    def _stacked(self, parts: Mapping[str, Span], what: str) -> torch.Tensor:
        taken = [self._weights.take(f"{name}.{what}", Cut(0, span)) for name, span in parts.items()]
        return stacked(taken)

    def _rows(self, name: str, span: Span, *, bias: bool) -> Linear:
        """A partial sum; the bias is in that of tp rank 0 alone."""
        has_bias = bias and self.shard.tp_rank == 0
        offset = self.tensor(f"{name}.bias") if has_bias else None
        ours = self._kernels.pack(self._weights.take(f"{name}.weight", Cut(1, span)), offset)
        return SummedLinear(ours, self._collectives) if self._is_divided else ours


class SummedLinear:
    """A product whose inputs are divided among the ranks of a stage: each has a partial sum."""

    def __init__(self, ours: Linear, collectives: Collectives) -> None:
        self._ours = ours
        self._all_reduce = collectives.all_reduce

    @property
    def out_features(self) -> int:
        return self._ours.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(self._ours(x))


class DividedEmbedding:
    """Each rank looks up the tokens it holds; the sum of all is exact, the others give zeros."""

    def __init__(self, weight: torch.Tensor, span: Span, collectives: Collectives) -> None:
        self._weight = weight
        self._span = span
        self._all_reduce = collectives.all_reduce

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        ours = token_ids - self._span.start
        elsewhere = (ours < 0) | (ours >= self._span.size)
        found = F.embedding(ours.masked_fill(elsewhere, 0), self._weight)
        return self._all_reduce(found.masked_fill_(elsewhere[:, None], 0.0))
