"""Read a model directory's tokenizer files: which exist, and what they say about special tokens.

`tokenizer.json` holds everything; older repositories (OPT's among them) have only `vocab.json`
and `merges.txt`, from which the same byte-level BPE is built.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from daemon.config_errors import reason_of, sentence_of
from daemon.errors import ConfigError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


_Id = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]  # some files have -1 for none


class TokenIds(msgspec.Struct, frozen=True, kw_only=True):
    """The ids that mean something to the service.

    `prepend_bos` says that the model wants its BOS before a plain text, whether or not the
    tokenizer's own file adds it. Ids run from 0 to `num_token_ids - 1`.
    """

    num_token_ids: int
    bos: int | None = None
    eos: tuple[int, ...] = ()
    prepend_bos: bool = False


class _Numbers(msgspec.Struct, frozen=True):
    """What is read of `config.json` and `generation_config.json` here."""

    eos_token_id: _Id | tuple[_Id, ...] | None = None
    vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    model_type: object = None


def load_library(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model directory, without post-processing of our own.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    whole = directory / "tokenizer.json"
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    try:
        if whole.exists():
            return tokenizers.Tokenizer.from_file(str(whole))
        if vocab.exists() and merges.exists():
            return _byte_level_bpe(directory, str(vocab), str(merges))
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(f"the tokenizer in {directory} cannot be read: {error}") from error
    raise ConfigError(f"{directory} has no tokenizer.json, and no vocab.json with merges.txt")


def load_token_ids(directory: Path, library: tokenizers.Tokenizer) -> TokenIds:
    """What the directory's configuration files say about token ids."""
    config = _read_numbers(directory / "config.json")
    generation = _read_numbers(directory / "generation_config.json")
    settings = read_json(directory / "tokenizer_config.json")
    names = named_tokens(directory)
    eos = _as_ids(generation.eos_token_id) or _as_ids(config.eos_token_id)
    eos_named = _id_of(library, names.get("eos_token"))
    num_known = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    return TokenIds(
        num_token_ids=min(num_known, config.vocab_size or num_known),
        bos=_id_of(library, names.get("bos_token")),
        eos=tuple(dict.fromkeys([*eos, *_as_ids(eos_named)])),
        prepend_bos=bool(settings.get("add_bos_token", config.model_type == "opt")),
    )


def named_tokens(directory: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, as the chat template sees them."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(directory / file)
        for name in _NAMED_TOKENS:
            token = content.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                named[name] = text
    return named


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file does not exist.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def _read_numbers(path: Path) -> _Numbers:
    try:
        return msgspec.convert(read_json(path), _Numbers)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {sentence_of(error, _Numbers)}") from error


def _byte_level_bpe(directory: Path, vocab: str, merges: str) -> tokenizers.Tokenizer:
    settings = read_json(directory / "tokenizer_config.json")
    library = tokenizers.Tokenizer(models.BPE.from_file(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(settings.get("add_prefix_space", False))
    )
    library.decoder = decoders.ByteLevel()
    names = sorted(set(named_tokens(directory).values()))
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return library


def _id_of(library: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else library.token_to_id(token)


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    """Configuration files give one id or a list of them."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
