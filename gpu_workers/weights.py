"""Where a model's weights come from: its safetensors files, or random numbers.

Names are compared with what the model needs before anything is read, so that a wrong directory
fails at once and says which names are missing or left over.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open

from gpu_workers.errors import ModelError

Progress = Callable[[float], None]
Shape = tuple[int, ...]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LISTED_NAMES = 8  # of those missing or left over, in an error message
RANDOM_NUMBERS = (1 << 20) + 7  # drawn once for dummy weights; coprime to every matrix width


class WeightSource(Protocol):
    """Gives each tensor of a model once, in the type the model runs in."""

    def take(self, name: str) -> torch.Tensor:
        """The tensor of that name; the caller owns it."""
        ...


class SafetensorsWeights:
    """Weights of a Hugging Face directory: one `model.safetensors`, or shards and their index.

    Files are memory-mapped; a tensor is read when it is taken, converted, and not kept.

    Args:
        shapes: every tensor of the whole model by its canonical name.
        optional: names that may be there without being used (tied heads, derived buffers).

    Raises:
        ModelError: no safetensors files, or names or shapes other than the model's.
    """

    def __init__(
        self,
        model_dir: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        *,
        optional: Callable[[str], bool] = lambda name: False,
        progress: Progress = lambda fraction: None,
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._progress = progress
        self._num_taken = 0
        self._files = {file: _open(file) for file in _files(model_dir)}
        self._places = {
            canonical_name(key): (file, key)
            for file, opened in self._files.items()
            for key in opened.offset_keys()
        }
        _check_names(model_dir, shapes, (n for n in self._places if n in shapes or not optional(n)))

    def take(self, name: str) -> torch.Tensor:
        file, key = self._places[name]
        found: torch.Tensor = self._files[file].get_tensor(key)
        if tuple(found.shape) != self._shapes[name]:
            raise ModelError(
                f"{file}: {key} has shape {tuple(found.shape)}, "
                f"config.json asks for {self._shapes[name]}"
            )
        self._num_taken += 1
        self._progress(self._num_taken / len(self._shapes))
        # A copy, never a view of the mapped file: that may be replaced while we run.
        return found.to(self._dtype, copy=True)


class DummyWeights:
    """Random weights of the right shapes, the same for the same seed; for benchmarks and tests.

    All tensors are windows of one small set of normal numbers, so that gigabytes take a second.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        *,
        seed: int = 0,
        progress: Progress = lambda fraction: None,
    ) -> None:
        self._shapes = shapes
        self._progress = progress
        self._num_taken = 0
        generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.randn(RANDOM_NUMBERS, generator=generator).to(dtype)

    def take(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        self._num_taken += 1
        self._progress(self._num_taken / len(self._shapes))
        if len(shape) == 1:
            return torch.full(
                shape, 0.0 if name.endswith("bias") else 1.0, dtype=self._numbers.dtype
            )
        size = shape[0] * shape[1]
        offset = crc32(name.encode()) % RANDOM_NUMBERS
        repeats = -(-(offset + size) // RANDOM_NUMBERS)
        window = self._numbers.repeat(repeats)[offset : offset + size]
        return window.mul(shape[1] ** -0.5).view(shape)


def canonical_name(key: str) -> str:
    """OPT files come with and without the leading `model.`; we name tensors with it."""
    return f"model.{key}" if key.startswith("decoder.") else key


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX
    if not index.exists():
        return [model_dir / SINGLE]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read as an index of safetensors: {error}") from error
    return [model_dir / name for name in sorted(set(names))]


def _open(file: Path) -> Any:  # safe_open, which is untyped
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{file} is not there; weights are read from safetensors only") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _check_names(model_dir: Path, shapes: Mapping[str, Shape], found: Iterable[str]) -> None:
    present = set(found)
    missing, left_over = shapes.keys() - present, present - shapes.keys()
    if missing or left_over:
        parts = [_listing("missing", missing), _listing("left over", left_over)]
        raise ModelError(f"weights in {model_dir}: " + "; ".join(part for part in parts if part))


def _listing(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return ""
    more = len(ordered) - LISTED_NAMES
    shown = ", ".join(ordered[:LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f"{len(ordered)} {what}: {shown}"
