"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated MLP."""

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


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One block's norms and packed weights."""

    attention_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Llama:
    """Consecutive layers of a Llama model, with embedding and head where it holds the ends."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, weights: WeightSource, layers: Span
    ) -> None:
        self.config = config
        self.layers = layers
        self._kernels = kernels
        self._is_last = holds_last(layers, config)
        load = Loader(kernels, weights, config.norm_eps)
        tied = config.tied_embeddings
        if holds_first(layers) or (self._is_last and tied):
            self._embedding = load.tensor("model.embed_tokens.weight")  # (V, H)
        self._blocks = [_load_layer(load, config, i) for i in range(layers.start, layers.stop)]
        if self._is_last:
            self._norm = load.norm("model.norm")
            self._head = kernels.pack(self._embedding if tied else load.tensor("lm_head.weight"))

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        kernels = self._kernels
        residual = F.embedding(batch.token_ids, self._embedding) if hidden is None else hidden
        added: torch.Tensor | None = None
        for index, block in enumerate(self._blocks):
            x = self._normed(added, residual, block.attention_norm)
            qkv = block.qkv(x)
            kernels.append(index, qkv)
            attended = kernels.attention(index, qkv)
            if self._is_last and index == self.layers.size - 1:
                attended, residual = pick_head_rows(batch, attended, residual)
            x = kernels.add_rms_norm(block.o(attended), residual, block.mlp_norm)
            added = block.down(kernels.silu_mul(block.gate_up(x)))
        return residual if added is None else residual.add_(added)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._kernels.rms_norm(hidden, self._norm))

    def _normed(
        self, added: torch.Tensor | None, residual: torch.Tensor, norm: Norm
    ) -> torch.Tensor:
        if added is None:
            return self._kernels.rms_norm(residual, norm)
        return self._kernels.add_rms_norm(added, residual, norm)


def llama_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the model and its shape, by the name checkpoints use."""
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    attention["o_proj"] = (hidden, q)
    mlp = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        shapes |= linear_shapes(f"{prefix}self_attn.", attention, bias=config.attention_bias)
        shapes |= linear_shapes(f"{prefix}mlp.", mlp, bias=config.mlp_bias)
    return shapes


def _load_layer(load: Loader, config: ModelConfig, index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [f"{attention}.{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    return LlamaLayer(
        attention_norm=load.norm(f"{prefix}.input_layernorm"),
        qkv=load.linear(*qkv, bias=config.attention_bias),
        o=load.linear(f"{attention}.o_proj", bias=config.attention_bias),
        mlp_norm=load.norm(f"{prefix}.post_attention_layernorm"),
        gate_up=load.linear(*gate_up, bias=config.mlp_bias),
        down=load.linear(f"{mlp}.down_proj", bias=config.mlp_bias),
    )
