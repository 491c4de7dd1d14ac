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
from gpu_workers.models.layers import Loader, Shapes, head_block, linear_shapes, pick_head_rows

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
    """A shard of an OPT model, with embeddings and head where it holds the ends."""

    def __init__(self, load: Loader, kernels: Kernels) -> None:
        self.config = config = load.config
        self.shard = shard = load.shard
        self._kernels = kernels
        self._end = head_block(shard)
        self._is_narrow = config.embed_dim != config.hidden_size
        tied = config.tied_embeddings
        if shard.is_first_stage or (shard.is_last_stage and tied):
            words = load.vocabulary(f"{DECODER}.embed_tokens")  # (V / tp, E)
        if shard.is_first_stage:
            self._load_embeddings(load, words)
        self._blocks = [_load_layer(load, i) for i in range(shard.layers.start, shard.layers.stop)]
        if shard.is_last_stage:
            self._load_head(load, words if tied else load.vocabulary("lm_head"))

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self._embed(batch) if hidden is None else hidden
        for index, block in enumerate(self._blocks):
            run = self._norm_first if self.config.norm_first else self._norm_last
            hidden = run(index, block, hidden, batch if index == self._end else None)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        kernels = self._kernels
        if self._final_norm is not None:
            hidden = kernels.layer_norm(hidden, self._final_norm)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden)

    def _embed(self, batch: Batch) -> torch.Tensor:
        tokens = self._embed_tokens(batch.token_ids)
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
            if not len(hidden):  # amid a prompt: a GPU refuses work on no rows
                return hidden
        x = kernels.add_layer_norm(block.o(attended), hidden, block.mlp_norm)
        return hidden.add_(self._mlp(block, x))

    def _norm_last(
        self, index: int, block: OptLayer, hidden: torch.Tensor, end: Batch | None
    ) -> torch.Tensor:
        kernels = self._kernels
        attended = self._attend(index, block, hidden)
        if end is not None:
            attended, hidden = pick_head_rows(end, attended, hidden)
            if not len(hidden):  # amid a prompt: a GPU refuses work on no rows
                return hidden
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

    def _load_embeddings(self, load: Loader, words: torch.Tensor) -> None:
        self._embed_tokens = load.embedding(words)
        self._positions = load.tensor(f"{DECODER}.embed_positions.weight")
        self._project_in = load.linear(f"{DECODER}.project_in") if self._is_narrow else None

    def _load_head(self, load: Loader, words: torch.Tensor) -> None:
        norm = f"{DECODER}.final_layer_norm"
        self._final_norm = load.norm(norm, bias=True) if self.config.final_norm else None
        self._project_out = load.linear(f"{DECODER}.project_out") if self._is_narrow else None
        self._head = load.head(words)


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


def _load_layer(load: Loader, index: int) -> OptLayer:
    prefix = f"{DECODER}.layers.{index}"
    return OptLayer(
        attention_norm=load.norm(f"{prefix}.self_attn_layer_norm", bias=True),
        qkv=load.qkv(f"{prefix}.self_attn"),
        o=load.attention_out(f"{prefix}.self_attn.out_proj"),
        mlp_norm=load.norm(f"{prefix}.final_layer_norm", bias=True),
        fc1=load.mlp_in(f"{prefix}.fc1", activation=load.config.activation),
        fc2=load.mlp_out(f"{prefix}.fc2"),
    )
