"""The table that `distserve profile` measures and the planner reads. Types alone."""

from typing import Annotated

import msgspec

from ipc.vocabulary import DeviceKind, DType

TABLE_VERSION = 2
SATURATION = 0.9
"""The share of the best prefill throughput, in tokens per second, that the prompt reaches which
is said to saturate the device (L_m; arXiv 2401.09670, section 3.1)."""

Count = Annotated[int, msgspec.Meta(ge=1)]
CountFromZero = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class PrefillPoint(msgspec.Struct, frozen=True):
    """A step that prefills `num_prompts` prompts of `num_tokens` each."""

    num_prompts: Count
    num_tokens: Count
    ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.num_prompts * self.num_tokens / self.ms


class DecodePoint(msgspec.Struct, frozen=True):
    """A step that decodes `batch` sequences which hold `context` tokens each."""

    batch: Count
    context: Count
    ms: float


class MixedPoint(msgspec.Struct, frozen=True):
    """A step that computes `num_new` tokens of one prompt, `num_cached` of it being there already,
    beside `batch` decodes of `context` tokens each (0 decodes: a chunk alone)."""

    num_new: Count
    num_cached: CountFromZero
    batch: CountFromZero
    context: CountFromZero
    ms: float


class TransferPoint(msgspec.Struct, frozen=True):
    """A pull of the keys and values of `num_tokens` tokens from another worker's pool."""

    num_tokens: Count
    ms: float


class StageShares(msgspec.Struct, frozen=True):
    """What the slowest stage of a pipeline takes of a whole step, by phase: `1 / pp` where stages
    are equal. Steps that follow each other do so at that distance."""

    prefill: Share
    decode: Share


class ProfileTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what.

    `saturation_tokens` is L_m, the shortest prompt that saturates the device (`SATURATION`). Steps
    are whole steps of the instance: of all its pipeline stages one after the other. Every row of a
    step draws: a chunk is a prompt's last. `slowest_stage` is None where there is one stage, or
    where it was not measured. `spread` is the relative standard deviation of repeated
    steps; `waited` is the share of the time in which other programs had the core, which is no part
    of the figures but says how quiet the machine was. Of several workers it is the leader's, and
    part of the figures: threads of their own collectives take turns with the arithmetic. Of steps
    on a GPU it is part of the figures, too, and decode steps there are at the distance at which a
    service runs them, where it has several under way at a time. `pull_path` is the way of the
    pulls: `memory` on CPU; within one GPU, between two, or through the host.
    """

    version: int = TABLE_VERSION
    model: str
    device: str
    device_kind: DeviceKind = DeviceKind.CPU
    kernels: str
    dtype: DType
    tp: Count = 1
    pp: Count = 1
    block_size: Count
    num_threads: int
    saturation_tokens: Count
    kv_bytes_per_token: Count
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    mixed: tuple[MixedPoint, ...] = ()
    transfer: tuple[TransferPoint, ...] = ()
    slowest_stage: StageShares | None = None
    spread: float = 0.0
    waited: float = 0.0
    pull_path: str = ""
