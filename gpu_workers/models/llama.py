"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated MLP."""

from dataclasses import dataclass

import torch

from gpu_workers.batch import Batch
from gpu_workers.kernels import Kernels, Linear, Norm
from gpu_workers.models.config import ModelConfig
from gpu_workers.models.layers import Loader, Shapes, head_block, linear_shapes, pick_head_rows


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
    """A shard of a Llama model, with embedding and head where it holds the ends."""

    def __init__(self, load: Loader, kernels: Kernels) -> None:
        self.config = config = load.config
        self.shard = shard = load.shard
        self._kernels = kernels
        self._end = head_block(shard)
        tied = config.tied_embeddings
        if shard.is_first_stage or (shard.is_last_stage and tied):
            words = load.vocabulary("model.embed_tokens")
            self._embed = load.embedding(words)
        self._blocks = [_load_layer(load, i) for i in range(shard.layers.start, shard.layers.stop)]
        if shard.is_last_stage:
            self._norm = load.norm("model.norm")
            self._head = load.head(words if tied else load.vocabulary("lm_head"))

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        kernels = self._kernels
        residual = self._embed(batch.token_ids) if hidden is None else hidden
        added: torch.Tensor | None = None
        for index, block in enumerate(self._blocks):
            x = self._normed(added, residual, block.attention_norm)
            qkv = block.qkv(x)
            kernels.append(index, qkv)
            attended = kernels.attention(index, qkv)
            if index == self._end:
                attended, residual = pick_head_rows(batch, attended, residual)
                if not len(residual):  # amid a prompt: a GPU refuses work on no rows
                    return residual
            x = kernels.add_rms_norm(block.o(attended), residual, block.mlp_norm)
            added = block.down(kernels.silu_mul(block.gate_up(x)))
        return residual if added is None else residual.add_(added)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
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


def _load_layer(load: Loader, index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LlamaLayer(
        attention_norm=load.norm(f"{prefix}.input_layernorm"),
        qkv=load.qkv(attention),
        o=load.attention_out(f"{attention}.o_proj"),
        mlp_norm=load.norm(f"{prefix}.post_attention_layernorm"),
        gate_up=load.mlp_in(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=load.mlp_out(f"{mlp}.down_proj"),
    )
