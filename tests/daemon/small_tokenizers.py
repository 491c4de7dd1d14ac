"""Tokenizers small enough to be trained in a test, of the two kinds that models use."""

import json
from functools import lru_cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from daemon.text import Tokenizer

SENTENCES = (
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Hello world, hello there! How are you today?",
    "User: tell me a story. Assistant: once upon a time there was a fox.",
    "你好，世界！今天天气很好。",  # noqa: RUF001
    "Party time 🎉🎉 with 👩‍👩‍👧 and naïve café façades.",
)
SPECIAL = ["</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


@lru_cache
def byte_level_json() -> str:
    """A byte-level BPE, as GPT-2's and most newer ones, as `tokenizer.json` holds it."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES, trainer)
    library.add_tokens(["<tool call>"])
    return library.to_str()


def byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_level_json())


@lru_cache
def sentence_piece_json() -> str:
    """A BPE with `▁` for spaces and `<0xNN>` for bytes it has no token for, as Llama 2's."""
    bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    library.train_from_iterator(SENTENCES[:3], trainer)
    trained = json.loads(library.to_str())
    vocab = trained["model"]["vocab"]
    for token in bytes_tokens:
        vocab.setdefault(token, len(vocab))
    library = tokenizers.Tokenizer.from_str(json.dumps(trained))
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return library.to_str()


def sentence_piece() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(sentence_piece_json())


def byte_level_directory(path: Path, **settings: object) -> Path:
    """A model directory with a byte-level tokenizer; `settings` go into tokenizer_config.json."""
    return _directory(path, byte_level_json(), {"eos_token": "<|im_end|>", **settings})


def sentence_piece_directory(path: Path, **settings: object) -> Path:
    return _directory(
        path, sentence_piece_json(), {"bos_token": "<s>", "eos_token": "</s>", **settings}
    )


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def _directory(path: Path, tokenizer: str, settings: dict[str, object]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
