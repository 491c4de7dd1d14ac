"""Which class computes which family, and which tensors each needs."""

import re

from gpu_workers.kernels import Kernels
from gpu_workers.models.config import Family, ModelConfig
from gpu_workers.models.layers import Loader, Model, Shapes
from gpu_workers.models.llama import Llama, llama_shapes
from gpu_workers.models.opt import Opt, opt_shapes
from ipc.sharding import Shard

LAYER = re.compile(r"\.layers\.(\d+)\.")
FIRST_STAGE_ONLY = ("embed_positions.", "project_in.")


def build_model(load: Loader, kernels: Kernels) -> Model:
    """The loader's shard of its model, with its weights."""
    match load.config.family:
        case Family.LLAMA:
            return Llama(load, kernels)
        case Family.OPT:
            return Opt(load, kernels)


def weight_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the whole model and its shape."""
    return llama_shapes(config) if config.family is Family.LLAMA else opt_shapes(config)


def held_names(config: ModelConfig, shard: Shard) -> list[str]:
    """The tensors that a shard holds, or of which it holds a part."""
    return [name for name in weight_shapes(config) if _is_held(name, config, shard)]


def is_optional(config: ModelConfig, name: str) -> bool:
    """Names that checkpoints may hold without need: tied heads, rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq") or (
        config.tied_embeddings and name == "lm_head.weight"
    )


def _is_held(name: str, config: ModelConfig, shard: Shard) -> bool:
    layer = LAYER.search(name)
    if layer is not None:
        return shard.layers.start <= int(layer[1]) < shard.layers.stop
    if "embed_tokens." in name:
        return shard.is_first_stage or (shard.is_last_stage and config.tied_embeddings)
    if any(part in name for part in FIRST_STAGE_ONLY):
        return shard.is_first_stage
    return shard.is_last_stage
