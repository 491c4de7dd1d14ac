"""What a Hugging Face `config.json` says about a model, checked once and frozen.

Pure: no torch, no weights. Two families are known: Llama (with Mistral, where no sliding window is
used) and OPT. Whatever this engine cannot compute exactly is refused here by name, so that a model
is either served as its authors meant it or not at all.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gpu_workers.errors import ModelError
from ipc import sharding
from ipc.sharding import ModelSizes, Shard
from ipc.vocabulary import DType, Parallelism

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Number = Annotated[float, msgspec.Meta(gt=0, le=1e12)]  # NaN is not above 0
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Family(StrEnum):
    """Which forward pass computes the model."""

    LLAMA = "llama"
    OPT = "opt"


class Activation(StrEnum):
    """The MLP's non-linearity; `silu` is the gate of a gated MLP, `gelu` the exact one."""

    SILU = "silu"
    RELU = "relu"
    GELU = "gelu"


class RopeKind(StrEnum):
    """How rotary frequencies are stretched. Within the trained length, dynamic equals default."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: its base and, where it is scaled, by which rule and numbers.

    `original_positions` is the length that the model was trained on before scaling.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: Number = 10_000.0
    factor: Number = 1.0
    original_positions: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    low_freq_factor: Number = 1.0
    high_freq_factor: Number = 4.0
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    truncate: bool = True
    attention_factor: Number | None = None
    mscale: Amount | None = None
    mscale_all_dim: Amount | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer.

    `embed_dim` differs from `hidden_size` in OPT-350m only, `norm_first` is False there only.
    `rope` is None where positions are learned (OPT).
    """

    name: str
    family: Family
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    max_positions: Size
    activation: Activation
    norm_eps: Number
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    embed_dim: Size
    norm_first: bool = True
    final_norm: bool = True
    rope: RopeConfig | None = None

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of keys and values that one token occupies over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.num_bytes

    @property
    def sizes(self) -> ModelSizes:
        """What a division among workers goes by."""
        return ModelSizes(
            name=self.name,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )

    @property
    def whole(self) -> Shard:
        """The share of a worker that is alone."""
        return self.shard(Parallelism(), 0, 0)

    def shard(self, parallelism: Parallelism, stage: int, tp_rank: int) -> Shard:
        """The share of one of an instance's workers.

        Raises:
            ModelError: the model cannot be divided like that.
        """
        reason = sharding.refusal(self.sizes, parallelism)
        if reason is not None:
            raise ModelError(reason)
        return sharding.shard(self.sizes, parallelism, stage, tp_rank)


def read_config(model_dir: str | Path) -> ModelConfig:
    """Read `config.json` of a local Hugging Face model directory.

    Raises:
        ModelError: no such file, not JSON, or a model that this engine cannot compute.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds no JSON object")
    return parse_config(raw, name=Path(model_dir).resolve().name)


def parse_config(raw: Mapping[str, Any], *, name: str) -> ModelConfig:
    """The same from the parsed file. Raises ModelError likewise."""
    listed = raw.get("architectures") or ["none"]
    architecture = str(listed[0] if isinstance(listed, list) else listed)
    family = ARCHITECTURES.get(architecture)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{name}: architecture {architecture} is not supported, only {known}")
    if raw.get("quantization_config"):
        raise ModelError(f"{name}: quantised weights are not supported")
    try:
        fields = {"name": name, "family": family, **_fields(family, raw)}
        config = msgspec.convert(fields, ModelConfig, strict=False)
    except (msgspec.ValidationError, KeyError) as error:
        raise ModelError(f"{name}: config.json: {_reason(error)}") from error
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    _check(config)
    return config


ARCHITECTURES = {
    "LlamaForCausalLM": Family.LLAMA,
    "MistralForCausalLM": Family.LLAMA,
    "OPTForCausalLM": Family.OPT,
}


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _fields(family: Family, raw: Mapping[str, Any]) -> dict[str, Any]:
    return _llama(raw) if family is Family.LLAMA else _opt(raw)


def _llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw.get("sliding_window"):
        raise ModelError(f"sliding-window attention ({raw['sliding_window']}) is not supported")
    num_heads = raw["num_attention_heads"]
    activation = raw.get("hidden_act", "silu")
    if activation != Activation.SILU:
        raise ModelError(f"activation {activation} is not supported in a Llama model, only silu")
    return {
        **_shared(raw),
        "intermediate_size": raw["intermediate_size"],
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "activation": activation,
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tied_embeddings": raw.get("tie_word_embeddings", False),
        "attention_bias": raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "embed_dim": raw["hidden_size"],
        "rope": _rope(raw),
    }


def _opt(raw: Mapping[str, Any]) -> dict[str, Any]:
    if not raw.get("layer_norm_elementwise_affine", True):
        raise ModelError("layer norms without weights are not supported")
    activation = raw.get("activation_function", "relu")
    if activation not in (Activation.RELU, Activation.GELU):
        raise ModelError(f"activation {activation} is not supported in an OPT model")
    norm_first = raw.get("do_layer_norm_before", True)
    bias = raw.get("enable_bias", True)
    return {
        **_shared(raw),
        "intermediate_size": raw["ffn_dim"],
        "num_kv_heads": raw["num_attention_heads"],
        "head_dim": raw["hidden_size"] // raw["num_attention_heads"],
        "activation": activation,
        "norm_eps": 1e-5,
        "tied_embeddings": raw.get("tie_word_embeddings", True),
        "attention_bias": bias,
        "mlp_bias": bias,
        "embed_dim": raw.get("word_embed_proj_dim") or raw["hidden_size"],
        "norm_first": norm_first,
        "final_norm": norm_first and not raw.get("_remove_final_layer_norm", False),
    }


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "max_positions": raw["max_position_embeddings"],
    }


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_theta` beside `rope_scaling`, and transformers 5's one dictionary."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError("rope_parameters (or rope_scaling) is no JSON object")
    kind = scaling.get("rope_type") or scaling.get("type") or RopeKind.DEFAULT
    if kind not in tuple(RopeKind):
        raise ModelError(f"RoPE type {kind} is not supported, only {', '.join(RopeKind)}")
    if raw.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("rotating only a part of each head (partial_rotary_factor) is unsupported")
    original = scaling.get("original_max_position_embeddings")
    known = {key: scaling[key] for key in ROPE_NUMBERS if scaling.get(key) is not None}
    return {
        **known,
        "kind": kind,
        "theta": scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        "factor": _rope_factor(kind, scaling, raw["max_position_embeddings"]),
        "original_positions": original or raw["max_position_embeddings"],
    }


ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def _rope_factor(kind: str, scaling: Mapping[str, Any], max_positions: int) -> Any:
    factor = scaling.get("factor")
    if factor is not None or kind in (RopeKind.DEFAULT, RopeKind.DYNAMIC):
        return factor or 1.0
    original = scaling.get("original_max_position_embeddings")
    if kind == RopeKind.YARN and original:
        return max_positions / original
    raise ModelError(f"RoPE type {kind} needs a factor, and config.json gives none")


def _check(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.name}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2 and config.rope is not None:
        raise ModelError(f"{config.name}: a head width of {config.head_dim} cannot be rotated")
