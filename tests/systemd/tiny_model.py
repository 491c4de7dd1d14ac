"""A model directory that a service serves at once: a Llama of a few rows, its weights made up."""

import json
from pathlib import Path

from tests.daemon.small_tokenizers import byte_level_directory

SETTINGS = """\
load_format = "dummy"
dtype = "float32"
kv_cache_gib = 0.02
"""


def make(path: Path) -> Path:
    """Everything but the weights, which `load_format = "dummy"` makes up."""
    byte_level_directory(path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 3,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
