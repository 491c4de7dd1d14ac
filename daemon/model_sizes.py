"""The sizes of the model to be served, off its `config.json`: what a division among workers needs.

Only names of fields that Llama and OPT share or spell differently are known here. Whether the
engine can compute the model is a worker's judgement, and its words are better.
"""

from typing import Any

import msgspec

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from daemon.tokenizer_files import read_json
from ipc.sharding import ModelSizes


class ModelOutline(msgspec.Struct, frozen=True, kw_only=True):
    """`num_weights` counts the matrices alone, a tied head once: a model takes that and more."""

    sizes: ModelSizes
    head_dim: int
    num_weights: int

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token's keys and values are, over all layers and heads."""
        return 2 * self.sizes.num_layers * self.sizes.num_kv_heads * self.head_dim


def read_outline(config: DaemonConfig) -> ModelOutline:
    """Raises ConfigError: a size is missing or is no positive whole number."""
    file = config.model_dir / "config.json"
    raw = read_json(file)
    is_gated = "intermediate_size" in raw
    num_heads = _count(raw, "num_attention_heads", file)
    sizes = ModelSizes(
        name=config.model_dir.resolve().name,
        num_layers=_count(raw, "num_hidden_layers", file),
        num_heads=num_heads,
        num_kv_heads=_count(raw, "num_key_value_heads", file, default=num_heads),
        hidden_size=_count(raw, "hidden_size", file),
        intermediate_size=_count(raw, "intermediate_size" if is_gated else "ffn_dim", file),
        vocab_size=_count(raw, "vocab_size", file),
    )
    head_dim = _count(raw, "head_dim", file, default=max(1, sizes.hidden_size // num_heads))
    num_weights = _num_weights(sizes, head_dim=head_dim, num_mlp_matrices=3 if is_gated else 2)
    return ModelOutline(sizes=sizes, head_dim=head_dim, num_weights=num_weights)


def _num_weights(sizes: ModelSizes, *, head_dim: int, num_mlp_matrices: int) -> int:
    attention = sizes.hidden_size * head_dim * 2 * (sizes.num_heads + sizes.num_kv_heads)
    mlp = num_mlp_matrices * sizes.hidden_size * sizes.intermediate_size
    return sizes.num_layers * (attention + mlp) + sizes.vocab_size * sizes.hidden_size


def _count(raw: dict[str, Any], name: str, file: object, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{file} gives no {name} of 1 or more")
    return value
