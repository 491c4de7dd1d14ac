"""Profile tables made from known coefficients, so that tests know what must come out."""

from pathlib import Path

import msgspec
import orjson

from ipc.profile_table import (
    DecodePoint,
    MixedPoint,
    PrefillPoint,
    ProfileTable,
    TransferPoint,
)
from ipc.vocabulary import DType

BASE_MS, TOKEN_MS, SQUARE_MS, PROMPT_MS = 5.0, 1.0, 2e-4, 1.5
STEP_MS, CONTEXT_MS, SEQUENCE_MS = 8.0, 2e-3, 1.0
LENGTHS = (16, 64, 256, 1024, 2048)
BATCHES, CONTEXTS = (1, 4, 16), (64, 256, 1024, 2048)


def prefill_ms(lengths: list[int], cached: int = 0) -> float:
    squares = sum(length * (length + 2 * cached) for length in lengths)
    packed = PROMPT_MS * (len(lengths) - 1)
    return BASE_MS + TOKEN_MS * sum(lengths) + SQUARE_MS * squares + packed


def decode_ms(batch: int, context_tokens: float) -> float:
    return STEP_MS + SEQUENCE_MS * batch + CONTEXT_MS * context_tokens


def mixed_ms(new: int, cached: int, batch: int, context: int) -> float:
    """15 % more than both parts together, less one step's start."""
    return 1.15 * (prefill_ms([new], cached) + decode_ms(batch, batch * context) - BASE_MS)


def profile_table(*, pp: int = 1, bare: bool = False) -> ProfileTable:
    """`bare`: without mixed steps and without pulls."""
    packed = [(number, length) for length in (32, 128) for number in (2, 4, 8)]
    prompts = [*((1, length) for length in LENGTHS), *packed]
    chunks = [(new, cached) for new in (32, 128, 512) for cached in (256, 1024)]
    beside = [
        (new, cached, batch, context)
        for new in (32, 128, 512)
        for cached in (0, 1024)
        for batch in (1, 8)
        for context in (128, 1024)
    ]
    alone = [MixedPoint(n, c, 0, 0, prefill_ms([n], c)) for n, c in chunks]
    mixed = [*alone, *(MixedPoint(*point, mixed_ms(*point)) for point in beside)]
    return ProfileTable(
        model="toy",
        device="cpu",
        kernels="native",
        dtype=DType.BF16,
        pp=pp,
        block_size=16,
        num_threads=1,
        saturation_tokens=256,
        kv_bytes_per_token=23_040,
        prefill=tuple(PrefillPoint(n, x, prefill_ms([x] * n)) for n, x in prompts),
        decode=tuple(DecodePoint(b, c, decode_ms(b, b * c)) for b in BATCHES for c in CONTEXTS),
        mixed=() if bare else tuple(mixed),
        transfer=() if bare else tuple(TransferPoint(n, 0.1 + 1e-3 * n) for n in (16, 512, 2048)),
        spread=0.02,
    )


def written(folder: Path, table: ProfileTable, **changed: object) -> Path:
    """A table as a file, with some fields of it changed."""
    path = folder / "profile.json"
    path.write_bytes(orjson.dumps(msgspec.to_builtins(table) | changed))
    return path
