"""The OPT family (arXiv 2205.01068): LayerNorm, learned positions, multi-head attention, plain MLP.

OPT-350m alone normalises after each block instead of before, and embeds tokens in a narrower
space than its hidden states.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpu_workers.batch import Batch
from gpu_workers.kernels import Kernels, Linear, Norm
from gpu_workers.models.config import ModelConfig
from gpu_workers.models.layers import (
    Loader,
    Shapes,
    holds_first,
    holds_last,
    linear_shapes,
    pick_head_rows,
)
from gpu_workers.weights import WeightSource
from ipc.kv_layout import Span

POSITION_OFFSET = 2  # the first two learned positions were padding when OPT was trained
DECODER = "model.decoder"


@dataclass(frozen=True, slots=True)
class OptLayer:
    """One block's norms and packed weights; the activation is part of `fc1`."""

    attention_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    fc1: Linear
    fc2: Linear


class Opt:
    """Consecutive layers of an OPT model, with embeddings and head where it holds the ends."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, weights: WeightSource, layers: Span
    ) -> None:
        self.config = config
        self.layers = layers
        self._kernels = kernels
        self._is_last = holds_last(layers, config)
        load = Loader(kernels, weights, config.norm_eps)
        if holds_first(layers):
            self._load_embeddings(load)
        self._blocks = [_load_layer(load, config, i) for i in range(layers.start, layers.stop)]
        if self._is_last:
            self._load_head(load)

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self._embed(batch) if hidden is None else hidden
        for index, block in enumerate(self._blocks):
            is_end = self._is_last and index == self.layers.size - 1
            run = self._norm_first if self.config.norm_first else self._norm_last
            hidden = run(index, block, hidden, batch if is_end else None)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        kernels = self._kernels
        if self._final_norm is not None:
            hidden = kernels.layer_norm(hidden, self._final_norm)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden)

    def _embed(self, batch: Batch) -> torch.Tensor:
        tokens = F.embedding(batch.token_ids, self._embedding)
        if self._project_in is not None:
            tokens = self._project_in(tokens)
        return tokens + F.embedding(batch.positions + POSITION_OFFSET, self._positions)

    def _norm_first(
        self, index: int, block: OptLayer, hidden: torch.Tensor, end: Batch | None
    ) -> torch.Tensor:
        kernels = self._kernels
        attended = self._attend(index, block, kernels.layer_norm(hidden, block.attention_norm))
        if end is not None:
            attended, hidden = pick_head_rows(end, attended, hidden)
        x = kernels.add_layer_norm(block.o(attended), hidden, block.mlp_norm)
        return hidden.add_(self._mlp(block, x))

    def _norm_last(
        self, index: int, block: OptLayer, hidden: torch.Tensor, end: Batch | None
    ) -> torch.Tensor:
        kernels = self._kernels
        attended = self._attend(index, block, hidden)
        if end is not None:
            attended, hidden = pick_head_rows(end, attended, hidden)
        x = kernels.add_layer_norm(block.o(attended), hidden, block.attention_norm)
        hidden.copy_(x)  # the normed sum is the new residual; x itself may be scratch
        x = kernels.add_layer_norm(self._mlp(block, hidden), hidden, block.mlp_norm)
        return hidden.copy_(x)

    def _attend(self, index: int, block: OptLayer, x: torch.Tensor) -> torch.Tensor:
        qkv = block.qkv(x)
        self._kernels.append(index, qkv)
        return self._kernels.attention(index, qkv)

    def _mlp(self, block: OptLayer, x: torch.Tensor) -> torch.Tensor:
        return block.fc2(block.fc1(x))

    def _load_embeddings(self, load: Loader) -> None:
        self._embedding = load.tensor(f"{DECODER}.embed_tokens.weight")  # (V, E)
        self._positions = load.tensor(f"{DECODER}.embed_positions.weight")
        is_narrow = self.config.embed_dim != self.config.hidden_size
        self._project_in = load.linear(f"{DECODER}.project_in") if is_narrow else None

    def _load_head(self, load: Loader) -> None:
        config = self.config
        is_narrow = config.embed_dim != config.hidden_size
        has_embedding = holds_first(self.layers)
        self._final_norm = (
            load.norm(f"{DECODER}.final_layer_norm", bias=True) if config.final_norm else None
        )
        self._project_out = load.linear(f"{DECODER}.project_out") if is_narrow else None
        if config.tied_embeddings and has_embedding:
            self._head = self._kernels.pack(self._embedding)
        else:
            name = f"{DECODER}.embed_tokens" if config.tied_embeddings else "lm_head"
            self._head = load.linear(name)


def opt_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the model and its shape, by the name checkpoints use."""
    hidden, embed = config.hidden_size, config.embed_dim
    shapes: Shapes = {
        f"{DECODER}.embed_tokens.weight": (config.vocab_size, embed),
        f"{DECODER}.embed_positions.weight": (config.max_positions + POSITION_OFFSET, hidden),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, embed)
    if embed != hidden:
        projections = {"project_in": (hidden, embed), "project_out": (embed, hidden)}
        shapes |= linear_shapes(f"{DECODER}.", projections, bias=False)
    if config.final_norm:
        shapes |= _norm_shapes(f"{DECODER}.final_layer_norm", hidden)
    for index in range(config.num_layers):
        shapes |= _layer_shapes(config, f"{DECODER}.layers.{index}.")
    return shapes


def _layer_shapes(config: ModelConfig, prefix: str) -> Shapes:
    hidden, width = config.hidden_size, config.intermediate_size
    attention = {f"{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
    mlp = {"fc1": (width, hidden), "fc2": (hidden, width)}
    return {
        **linear_shapes(f"{prefix}self_attn.", attention, bias=config.attention_bias),
        **linear_shapes(prefix, mlp, bias=config.mlp_bias),
        **_norm_shapes(f"{prefix}self_attn_layer_norm", hidden),
        **_norm_shapes(f"{prefix}final_layer_norm", hidden),
    }


def _norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _load_layer(load: Loader, config: ModelConfig, index: int) -> OptLayer:
    prefix = f"{DECODER}.layers.{index}"
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
    return OptLayer(
        attention_norm=load.norm(f"{prefix}.self_attn_layer_norm", bias=True),
        qkv=load.linear(*qkv, bias=config.attention_bias),
        o=load.linear(f"{prefix}.self_attn.out_proj", bias=config.attention_bias),
        mlp_norm=load.norm(f"{prefix}.final_layer_norm", bias=True),
        fc1=load.linear(f"{prefix}.fc1", bias=config.mlp_bias, activation=config.activation),
        fc2=load.linear(f"{prefix}.fc2", bias=config.mlp_bias),
    )
