"""Models by name, and from a Hugging Face `config.json`.

The sizes are those of the published configurations.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from planner.errors import PlannerError
from planner.json_files import read_json
from planner.model_shape import Experts, LatentAttention, ModelShape


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_size=4 * hidden,
        vocab_size=50272,
        max_positions=2048,
        has_gate=False,
        tied_embeddings=True,
        has_bias=True,
        learned_positions=True,
    )


def _llama(name: str, sizes: tuple[int, ...], **more: Any) -> ModelShape:
    """`sizes`: layers, hidden, heads, KV heads, head size, MLP, vocabulary, positions."""
    layers, hidden, heads, kv_heads, head_dim, mlp, vocab, positions = sizes
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        vocab_size=vocab,
        max_positions=positions,
        **more,
    )


_DEEPSEEK_V3_EXPERTS = Experts(
    num_experts=256, per_token=8, mlp_size=2048, num_shared=1, num_dense_layers=3
)
_DEEPSEEK_V3_LATENT = LatentAttention(
    q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128
)

CATALOG: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _opt("opt-1.3b", 24, 2048, 32),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        _llama("llama-2-7b", (32, 4096, 32, 32, 128, 11008, 32000, 4096)),
        _llama("llama-2-70b", (80, 8192, 64, 8, 128, 28672, 32000, 4096)),
        _llama("llama-3-8b", (32, 4096, 32, 8, 128, 14336, 128256, 8192)),
        _llama("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336, 128256, 131072)),
        _llama("llama-3-70b", (80, 8192, 64, 8, 128, 28672, 128256, 8192)),
        _llama("llama-3.1-70b", (80, 8192, 64, 8, 128, 28672, 128256, 131072)),
        _llama(
            "mixtral-8x7b",
            (32, 4096, 32, 8, 128, 14336, 32000, 32768),
            experts=Experts(num_experts=8, per_token=2, mlp_size=14336),
        ),
        _llama("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 151936, 40960), has_qk_norm=True),
        _llama(
            "qwen3-30b-a3b",
            (48, 2048, 32, 4, 128, 6144, 151936, 40960),
            has_qk_norm=True,
            experts=Experts(num_experts=128, per_token=8, mlp_size=768),
        ),
        _llama(
            "deepseek-v3",
            (61, 7168, 128, 128, 192, 18432, 129280, 163840),
            experts=_DEEPSEEK_V3_EXPERTS,
            latent=_DEEPSEEK_V3_LATENT,
            weight_bits=8,
            compute_bits=8,
        ),
        _llama("smollm2-135m", (30, 576, 9, 3, 64, 1536, 49152, 8192), tied_embeddings=True),
    )
}


def model_shape(name: str) -> ModelShape:
    """A model from the catalog, or from a directory or file with its `config.json`."""
    known = CATALOG.get(_plain(name))
    if known is not None:
        return known
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file():
        return read_config(path / "config.json")
    if path.is_file():
        return read_config(path)
    raise PlannerError(_unknown(name))


def _plain(name: str) -> str:
    """`facebook/opt-13b` and `OPT-13B` are the same model."""
    plain = name.rsplit("/", 1)[-1].lower()
    return plain.removeprefix("meta-").removesuffix("-instruct")


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(_plain(name), CATALOG, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"unknown model {name!r}: {hint}known are {', '.join(CATALOG)}, "
        "or name a directory with a config.json"
    )


_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Quantisation(msgspec.Struct, kw_only=True):
    """How weights are stored; without `bits` the method's name says it (fp8)."""

    quant_method: str = ""
    bits: int | None = None


class _HfConfig(msgspec.Struct, kw_only=True):
    """The fields that the planner reads, under the names of Llama-like and OPT configurations."""

    model_type: str
    num_hidden_layers: _Size
    hidden_size: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size = 2048
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    ffn_dim: int | None = None
    tie_word_embeddings: bool | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    quantization_config: _Quantisation | None = None


def read_config(path: Path) -> ModelShape:
    """A shape from a Hugging Face configuration; PlannerError names the file and the field."""
    config = read_json(path, _HfConfig)
    mlp_size = config.ffn_dim or config.intermediate_size
    if mlp_size is None:
        raise PlannerError(f"{path}: neither `intermediate_size` nor `ffn_dim` is there")
    return _from_config(config, mlp_size, path)


def _from_config(config: _HfConfig, mlp_size: int, path: Path) -> ModelShape:
    is_opt = config.model_type == "opt"
    name = path.parent.name if path.name == "config.json" else path.stem
    return ModelShape(
        name=name or config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        mlp_size=mlp_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        has_gate=not is_opt,
        # Transformers' default: OPT ties its embeddings, the Llama family does not.
        tied_embeddings=is_opt
        if config.tie_word_embeddings is None
        else config.tie_word_embeddings,
        has_bias=is_opt,
        learned_positions=is_opt,
        has_qk_norm=config.model_type.startswith("qwen3"),
        experts=_experts(config, mlp_size),
        latent=_latent(config),
        weight_bits=_weight_bits(config),
        compute_bits=8 if _is_fp8(config) else 16,
    )


def _is_fp8(config: _HfConfig) -> bool:
    quantisation = config.quantization_config
    return quantisation is not None and "fp8" in quantisation.quant_method


def _weight_bits(config: _HfConfig) -> int:
    if config.quantization_config is None:
        return 16
    return config.quantization_config.bits or (8 if _is_fp8(config) else 16)


def _experts(config: _HfConfig, mlp_size: int) -> Experts | None:
    count = config.num_local_experts or config.num_experts or config.n_routed_experts
    if not count:
        return None
    return Experts(
        num_experts=count,
        per_token=config.num_experts_per_tok or 1,
        mlp_size=config.moe_intermediate_size or mlp_size,
        num_shared=config.n_shared_experts or 0,
        num_dense_layers=config.first_k_dense_replace,
    )


def _latent(config: _HfConfig) -> LatentAttention | None:
    if not config.kv_lora_rank:
        return None
    return LatentAttention(
        q_rank=config.q_lora_rank or config.hidden_size,
        kv_rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        nope_dim=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
    )
