"""Whether a freshly converted model directory is what it should be.

Looks only at files: the configuration, the header of the weights, the tokenizer and the chat
template. A wrong end-of-sequence id or a lossy tokenizer would not crash anything; it would make
the model answer nonsense, so both are checked before the directory is used.
"""

from pathlib import Path
from typing import Any

import msgspec
import orjson
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_SAMPLES = ("Hello, world.\n\n  x1 = 12", "分离的预填充与解码", "naïve 👩‍👩‍👧 🚀 done")


class NotAsExpected(Exception):
    """The directory is incomplete or holds another model."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the model beforehand."""

    architecture: str
    num_tensors: int
    eos_token: str
    system_prompt: str


def check_directory(directory: Path, expected: Expected) -> None:
    """Raise NotAsExpected unless the directory holds the whole expected model."""
    try:
        config = orjson.loads((directory / "config.json").read_bytes())
        tensors = _read_header(directory / "model.safetensors")
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        orjson.loads((directory / "generation_config.json").read_bytes())
        orjson.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise NotAsExpected(str(error)) from error
    _check_config(config, expected)
    _check_tensors(tensors, expected)
    _check_tokenizer(tokenizer, config, expected)
    _check_template(template, expected)


def _read_header(weights: Path) -> dict[str, Any]:
    """The table of contents of a safetensors file; the length must fit the file."""
    with open(weights, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > weights.stat().st_size:
            raise ValueError(f"{weights.name} is cut short")
        header: dict[str, Any] = orjson.loads(stream.read(size))
    header.pop("__metadata__", None)
    num_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + size + num_bytes != weights.stat().st_size:
        raise ValueError(f"{weights.name} is cut short")
    return header


def _read_tokenizer(file: Path) -> Tokenizer:
    text = file.read_text(encoding="utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file.name}: {error}") from error


def _check_config(config: dict[str, Any], expected: Expected) -> None:
    if config.get("architectures") != [expected.architecture]:
        raise NotAsExpected(f"it is {config.get('architectures')}, not {expected.architecture}")


def _check_tensors(tensors: dict[str, Any], expected: Expected) -> None:
    if len(tensors) != expected.num_tensors:
        raise NotAsExpected(f"it has {len(tensors)} tensors, not {expected.num_tensors}")
    if others := {entry["dtype"] for entry in tensors.values()} - {"BF16"}:
        raise NotAsExpected(f"it has weights in {', '.join(sorted(others))}, not in BF16")


def _check_tokenizer(tokenizer: Tokenizer, config: dict[str, Any], expected: Expected) -> None:
    if tokenizer.token_to_id(expected.eos_token) != config.get("eos_token_id"):
        raise NotAsExpected(f"eos_token_id {config.get('eos_token_id')} is not its end token")
    for sample in _SAMPLES:
        if (back := tokenizer.decode(tokenizer.encode(sample).ids)) != sample:
            raise NotAsExpected(f"its tokenizer turns {sample!r} into {back!r}")


def _check_template(template: str, expected: Expected) -> None:
    messages = [{"role": "user", "content": "Good morning"}]
    try:
        chat = ImmutableSandboxedEnvironment().from_string(template)
        text = chat.render(messages=messages, add_generation_prompt=True)
    except TemplateError as error:
        raise NotAsExpected(f"its chat template fails: {error}") from error
    for part in (expected.system_prompt, "Good morning", expected.eos_token):
        if part not in text:
            raise NotAsExpected(f"its chat template leaves out {part!r}")
