"""Tiny checkpoints that four ranks and two stages can share."""

from pathlib import Path

from tests.gpu_workers.checkpoints import llama_gqa, llama_mha, opt_post_norm, opt_pre_norm


def divisible(name: str, path: Path) -> Path:
    """The checkpoint of that kind.

    The first one's KV heads are shared by ranks where tp is 4, and its vocabulary is padded.
    """
    match name:
        case "llama-gqa":
            heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 263}
            return llama_gqa(path, **heads, num_hidden_layers=3)
        case "llama-mha":
            return llama_mha(path)
        case "opt-pre-norm":
            return opt_pre_norm(path, num_attention_heads=4)
        case _:
            return opt_post_norm(path, num_attention_heads=4)
