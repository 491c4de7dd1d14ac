"""Model directories that the check makes itself: nothing is fetched."""

import json
from pathlib import Path
from typing import Any

BYTES = 256
EOS = 257
NUM_TOKEN_IDS = 259  # of the tokenizer: a token for each byte, and three special ones
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 264,
    "max_position_embeddings": 1024,
}
WIDE: dict[str, Any] = TINY | {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Heads of 128, as most large models have."""
SMOLLM2: dict[str, Any] = TINY | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""The shape of SmolLM2-135M's layers: three query heads to a KV head."""
MODELS = {"tiny": TINY, "128 wide": WIDE, "smollm2": SMOLLM2}
LLAMA_3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def write_config(path: Path, shape: dict[str, Any]) -> Path:
    """A Llama of that shape, without weights: for dummy ones."""
    path.mkdir(parents=True, exist_ok=True)
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": EOS,
    }
    (path / "config.json").write_text(json.dumps(fixed | shape), encoding="utf-8")
    return path


def write_tokenizer(path: Path) -> None:
    """One token per byte, so that the daemon has what it needs to read and write text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|eos|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def prompts(count: int, longest: int) -> list[list[int]]:
    """Bytes as tokens, of lengths from 1 up, the same every time."""
    lengths = [1 + (longest - 1) * index // max(1, count - 1) for index in range(count)]
    return [[(7 * i + 13 * j) % BYTES for j in range(n)] for i, n in enumerate(lengths)]
