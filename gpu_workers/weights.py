"""Where a model's weights come from: its safetensors files, or random numbers.

Names are compared with what the whole model needs before anything is read, so that a wrong
directory fails at once and says which names are missing or left over. A worker that holds a part
of the model takes parts of tensors, and no other bytes are read.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from gpu_workers.errors import ModelError
from ipc.kv_layout import Span

Shape = tuple[int, ...]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED = ("BF16", "F16", "F32", "F64")  # all else is quantised, or no weights
LISTED_NAMES = 8  # of those missing or left over, in an error message
RANDOM_NUMBERS = (1 << 20) + 7  # drawn once for dummy weights; coprime to every matrix width


class Cut(NamedTuple):
    """A part of a tensor: a range along one dimension. What lies beyond the tensor is zero."""

    dim: int
    span: Span

    def within(self, shape: Shape) -> tuple[slice, ...]:
        """The part of it that is there, as an index."""
        size = shape[self.dim]
        start, stop = min(self.span.start, size), min(self.span.stop, size)
        return (*(slice(None),) * self.dim, slice(start, stop))


class WeightSource(Protocol):
    """Gives each tensor of a model, or a part of it, once, in the type the model runs in."""

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """The tensor of that name, or a part; the caller owns it."""
        ...


class _Index(msgspec.Struct):
    """In which file each tensor is."""

    weight_map: dict[str, str]


class SafetensorsWeights:
    """Weights of a Hugging Face directory: one `model.safetensors`, or shards and their index.

    Files are memory-mapped; a tensor is read when it is taken, converted, and not kept.
    `num_bytes` counts what was read.

    Args:
        shapes: every tensor of the whole model by its canonical name.
        optional: names that may be there without being used (tied heads, derived buffers).
        taken: called after each tensor.

    Raises:
        ModelError: no safetensors files, names or shapes other than the model's, or no numbers.
    """

    def __init__(
        self,
        model_dir: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        *,
        optional: Callable[[str], bool] = lambda name: False,
        taken: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_bytes = 0
        self._shapes = shapes
        self._dtype = dtype
        self._taken = taken
        self._files = {file: _open(file) for file in _files(model_dir)}
        self._places = {
            canonical_name(key): (file, key)
            for file, opened in self._files.items()
            for key in opened.offset_keys()
        }
        _check_names(model_dir, shapes, (n for n in self._places if n in shapes or not optional(n)))

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        file, key = self._places[name]
        stored, shape = self._files[file].get_slice(key), self._shapes[name]
        if tuple(stored.get_shape()) != shape:
            raise ModelError(
                f"{file}: {key} has shape {tuple(stored.get_shape())}, config.json asks for {shape}"
            )
        found: torch.Tensor = stored[cut.within(shape) if cut else ...]
        self.num_bytes += found.nbytes
        self._taken()
        # A copy, never a view of the mapped file: that may be replaced while we run.
        weights = found.to(self._dtype, copy=True)
        _check_numbers(f"{file}: {key}", stored.get_dtype(), weights)
        return _padded(weights, cut)


class DummyWeights:
    """Random weights of the right shapes, the same for the same seed; for benchmarks and tests.

    All tensors are windows of one small set of normal numbers, so that gigabytes take a second;
    a part has the numbers of that part of the whole tensor. They are made on `device`, where it is
    given, out of the same numbers.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        *,
        seed: int = 0,
        taken: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        self._shapes = shapes
        self._taken = taken
        generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.randn(RANDOM_NUMBERS, generator=generator).to(dtype).to(device)

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        index = cut.within(shape) if cut else (slice(None),)
        self._taken()
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return _padded(self._numbers.new_full(shape, value)[index], cut)
        rows, columns = shape[0], shape[1]
        first, stop, _ = index[0].indices(rows)
        start = (crc32(name.encode()) + first * columns) % RANDOM_NUMBERS
        window = self._window(start, (stop - first) * columns).view(stop - first, columns)
        return _padded(window[(slice(None), *index[1:])].mul(columns**-0.5), cut)

    def _window(self, start: int, size: int) -> torch.Tensor:
        repeats = -(-(start + size) // RANDOM_NUMBERS)
        return self._numbers.repeat(repeats)[start : start + size]


def canonical_name(key: str) -> str:
    """OPT files come with and without the leading `model.`; we name tensors with it."""
    return f"model.{key}" if key.startswith("decoder.") else key


def _padded(found: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """With zeros for what the cut asked for beyond the tensor."""
    if cut is None or found.shape[cut.dim] == cut.span.size:
        return found
    shape = list(found.shape)
    shape[cut.dim] = cut.span.size
    whole = found.new_zeros(shape)
    whole.narrow(cut.dim, 0, found.shape[cut.dim]).copy_(found)
    return whole


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX
    if not index.exists():
        return [model_dir / SINGLE]
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read as an index of safetensors: {error}") from error
    return [model_dir / name for name in sorted(set(names))]


def _check_numbers(what: str, stored: str, weights: torch.Tensor) -> None:
    """A model with one NaN answers every prompt with nonsense, and nothing else would tell."""
    if stored not in STORED:
        raise ModelError(f"{what} is stored as {stored}, and only {', '.join(STORED)} are read")
    if weights.numel() and not all(bound.isfinite() for bound in weights.aminmax()):  # or are NaN
        raise ModelError(f"{what} holds numbers that are not finite in {weights.dtype}")


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
