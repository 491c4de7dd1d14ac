"""Which class computes which family, and which tensors each needs."""

from gpu_workers.kernels import Kernels
from gpu_workers.models.config import Family, ModelConfig
from gpu_workers.models.layers import Model, Shapes
from gpu_workers.models.llama import Llama, llama_shapes
from gpu_workers.models.opt import Opt, opt_shapes
from gpu_workers.weights import WeightSource
from ipc.kv_layout import Span


def build_model(
    config: ModelConfig, kernels: Kernels, weights: WeightSource, layers: Span | None = None
) -> Model:
    """The stage of a model that holds `layers` (all of them by default), weights loaded."""
    span = layers or Span(0, config.num_layers)
    match config.family:
        case Family.LLAMA:
            return Llama(config, kernels, weights, span)
        case Family.OPT:
            return Opt(config, kernels, weights, span)


def weight_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the whole model and its shape."""
    return llama_shapes(config) if config.family is Family.LLAMA else opt_shapes(config)


def is_optional(config: ModelConfig, name: str) -> bool:
    """Names that checkpoints may hold without need: tied heads, rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq") or (
        config.tied_embeddings and name == "lm_head.weight"
    )
