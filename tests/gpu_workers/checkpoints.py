"""Tiny Hugging Face checkpoints with random weights and a working byte-level tokenizer.

Each is a directory that transformers, the engine and the whole service can load. Vocabulary: the
256 bytes, then `<|bos|>` (256), `<|eos|>` (257), `<|pad|>` (258); model vocabularies are padded
beyond the tokenizer's, as real ones are.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

BOS, EOS, PAD = 256, 257, 258
NUM_TOKEN_IDS = 259
VOCAB_SIZE = 264


def llama_gqa(path: Path, **changes: Any) -> Path:
    """Llama with grouped-query attention and tied embeddings."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return save(LlamaForCausalLM(_llama_config(**{**shape, **changes})), path)


def llama_mha(path: Path, **changes: Any) -> Path:
    """Llama with as many KV heads as heads, untied embeddings and biases everywhere."""
    shape = {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    return save(LlamaForCausalLM(_llama_config(**{**shape, **changes})), path)


def opt_pre_norm(path: Path, **changes: Any) -> Path:
    """OPT as most sizes are: LayerNorm before each block."""
    return save(OPTForCausalLM(_opt_config(**changes)), path)


def opt_post_norm(path: Path, **changes: Any) -> Path:
    """OPT as the 350m size is: LayerNorm after each block, projected word embeddings."""
    shape = {"do_layer_norm_before": False, "word_embed_proj_dim": 32}
    return save(OPTForCausalLM(_opt_config(**{**shape, **changes})), path)


CHECKPOINTS = {
    "llama-gqa": llama_gqa,
    "llama-mha": llama_mha,
    "opt-pre-norm": opt_pre_norm,
    "opt-post-norm": opt_post_norm,
}


def save(model: PreTrainedModel, path: Path, *, seed: int = 0) -> Path:
    """Give the model decided random weights and write it with its tokenizer."""
    _decide(model, seed)
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte of UTF-8, id = byte."""
    printable = _printable_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={printable[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|eos|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _decide(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that the likeliest token leads clearly and the context matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(centre + 0.1 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            if len(parameter) == VOCAB_SIZE:
                parameter[NUM_TOKEN_IDS:] = 0  # padding is never the likeliest


def _llama_config(**changes: Any) -> LlamaConfig:
    shape = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return LlamaConfig(**{**shape, **changes})


def _opt_config(**changes: Any) -> OPTConfig:
    shape = {
        "hidden_size": 128,
        "ffn_dim": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return OPTConfig(**{**shape, **changes})


def _printable_bytes() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible}
    table |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]
